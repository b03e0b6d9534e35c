"""Processes of this machine, by /proc."""

from __future__ import annotations

from pathlib import Path


def process_of(name: str, among: set[int]) -> dict[int, str]:
    """Those of the processes whose command begins with that name, with their commands."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if command.startswith(name) and int(entry.name) in among:
                found[int(entry.name)] = command
    return found


def below(pid: int) -> set[int]:
    """All processes below one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found
