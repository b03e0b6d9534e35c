"""Find and run the code blocks of a Markdown page.

Blocks run in the page's order: Python in one namespace, shell in the same folder. If a block needs
something that readers bring themselves, an HTML comment before it, hidden from them, provides it:

    <!-- setup
    images = torch.rand(4, 3, 32, 32)
    -->

A comment on the line before a block marks it:

    <!-- slow -->                 runs in `make slow` only
    <!-- options: --limit 64 -->  appended to each `moetta` command of the block
    <!-- not run: reason -->      cannot run here; shows up as a skipped test with its reason
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON, SHELL = ("python",), ("bash",)
NO_CODE = ("text", "toml", "json", "bibtex")
MARK = re.compile(r"<!-- (slow|options|not run)(?:: (.+?))? -->")


@dataclass(frozen=True)
class Block:
    """A piece of code on a page."""

    page: Path
    line: int  # of its first line of code
    language: str
    code: str
    slow: bool = False
    options: str = ""
    not_run: str = ""

    def __str__(self) -> str:
        page = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page
        return f"{page}:{self.line}"


def pages() -> list[Path]:
    """Every page with blocks to run."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The page's blocks of code, hidden set-up included.

    Raises:
        ValueError: a block has no language, an unknown one, or a mark that means nothing.
    """
    lines = page.read_text().splitlines()
    marks: dict[str, str] = {}
    index = 0
    while index < len(lines):
        text = lines[index].strip()
        index += 1
        if text == "<!-- setup":
            end = _find(lines, index, "-->", page)
            yield Block(page, index + 1, "python", "\n".join(lines[index:end]))
            index = end + 1
        elif fence := re.fullmatch(r"(`{3,})\s*(\S*).*", text):
            indent = len(lines[index - 1]) - len(lines[index - 1].lstrip())
            end = _find(lines, index, fence[1], page)
            code = "\n".join(_expand(line[indent:], page) for line in lines[index:end])
            yield _block(page, index + 1, fence[2], code, marks)
            index, marks = end + 1, {}
        elif mark := MARK.fullmatch(text):
            marks[mark[1]] = mark[2] or "yes"
        elif marks or text.startswith(("<!-- slow", "<!-- not", "<!-- opt")):
            raise ValueError(f"{page}:{index}: this mark is not followed by a block")


def run(chosen: Iterable[Block], folder: Path, names: dict[str, Any]) -> None:
    """Run blocks in order, in ``folder``, which must be the working directory.

    Raises:
        AssertionError: a shell block failed; the message holds its output.
        Exception: whatever a Python block raised.
    """
    for block in chosen:
        if block.language in PYTHON:
            # Padding makes a traceback's line numbers those of the page.
            source = "\n" * (block.line - 1) + block.code
            exec(compile(source, str(block.page), "exec"), names)
        elif block.language in SHELL:
            _shell(block, folder)


def _shell(block: Block, folder: Path) -> None:
    tools = folder / ".bin"
    tools.mkdir(exist_ok=True)
    command = tools / "moetta"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m moetta "$@"\n')
    command.chmod(0o755)
    (tools / "python").unlink(missing_ok=True)
    (tools / "python").symlink_to(sys.executable)
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)]),
        "OMP_NUM_THREADS": "1",
    }
    code = "\n".join(_with_options(line, block.options) for line in block.code.splitlines())
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{block} ended with {done.returncode}:\n{code}\n{done.stdout}"


def _with_options(line: str, options: str) -> str:
    command, mark, comment = line.partition(" #")
    if not options or not command.startswith("moetta "):
        return line
    return f"{command.rstrip()} {options} {mark}{comment}"


def _block(page: Path, line: int, language: str, code: str, marks: dict[str, str]) -> Block:
    if language not in (*PYTHON, *SHELL, *NO_CODE):
        raise ValueError(
            f"{page}:{line}: language {language!r} of this block; expected one of "
            f"{', '.join((*PYTHON, *SHELL, *NO_CODE))}"
        )
    if marks and language in NO_CODE:
        raise ValueError(f"{page}:{line}: a {language} block never runs and takes no mark")
    if marks.get("not run") == "yes":
        raise ValueError(f"{page}:{line}: say why this block cannot run")
    return Block(
        page,
        line,
        language,
        code,
        slow="slow" in marks,
        options=marks.get("options", ""),
        not_run=marks.get("not run", ""),
    )


def _find(lines: list[str], start: int, end: str, page: Path) -> int:
    for index in range(start, len(lines)):
        if lines[index].strip() == end:
            return index
    raise ValueError(f"{page}:{start}: no line {end!r} ends this block")


def _expand(line: str, page: Path) -> str:
    """A line, or the file that it includes (`--8<-- "path"`, as the site does)."""
    include = re.fullmatch(r'--8<-- "(.+)"', line.strip())
    return (ROOT / include[1]).read_text() if include else line
