"""Runs at a URL: copied whole, the file that makes the others count last."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moetta.bench.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/bucket")


def fill(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}.json").write_text(text)


@pytest.mark.parametrize("url", ["file://{}/bucket", "memory://bucket", "{}/bucket"])
def test_there_and_back(url: str, tmp_path: Path) -> None:
    store = Store(url.format(tmp_path))
    fill(tmp_path / "a" / "run", card="{}", checkpoint__progress="1", checkpoint__meter="2")
    (tmp_path / "a" / "run" / "lock").touch()
    (tmp_path / "a" / "run" / ".half.tmp").touch()
    store.send(tmp_path / "a")
    assert store.folders() == ["run"]
    Store(store.url).fetch(["run"], tmp_path / "b")
    names = sorted(p.relative_to(tmp_path / "b").as_posix() for p in (tmp_path / "b").rglob("*.*"))
    expected = ["run/card.json", "run/checkpoint/meter.json", "run/checkpoint/progress.json"]
    assert names == expected
    assert (tmp_path / "b" / "run" / "checkpoint" / "meter.json").read_text() == "2"
    store.remove("run")
    assert store.folders() == []


def test_only_changes_are_sent_and_old_checkpoints_go(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    write = Store.write

    def noted(self: Store, name: str, data: bytes) -> None:
        sent.append(name)
        write(self, name, data)

    monkeypatch.setattr(Store, "write", noted)
    root = tmp_path / "a"
    fill(root / "run", card="{}", checkpoint__progress="1", checkpoint__meter_1="x")
    store.send(root)
    assert sent[-1] == "run/checkpoint/progress.json"
    sent.clear()
    store.send(root)
    assert sent == []
    (root / "run" / "checkpoint" / "meter_1.json").unlink()
    fill(root / "run", checkpoint__progress="22", checkpoint__meter_2="y")
    store.send(root)
    assert sent == ["run/checkpoint/meter_2.json", "run/checkpoint/progress.json"]
    kept = sorted(p.name for p in (tmp_path / "bucket" / "run" / "checkpoint").iterdir())
    assert kept == ["meter_2.json", "progress.json"]
    shutil.rmtree(root / "run" / "checkpoint")
    fill(root / "run", steps="s", summary="{}")
    sent.clear()
    store.send(root)
    assert sent == ["run/steps.json", "run/summary.json"]
    assert not (tmp_path / "bucket" / "run" / "checkpoint").exists()


def test_a_checkpoint_replaced_while_it_is_read(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"run/checkpoint/meter-1.json": b"1", "run/checkpoint/progress.json": b"1"}
    for name, data in first.items():
        store.write(name, data)
    read, done = Store.read, list[str]()

    def replaced(self: Store, name: str) -> bytes:
        if not done:
            done.append(name)
            store.write("run/checkpoint/meter-2.json", b"2")
            store.write("run/checkpoint/progress.json", json.dumps(2).encode())
            store.remove("run/checkpoint/meter-1.json")
        return read(self, name)

    monkeypatch.setattr(Store, "read", replaced)
    store.fetch(["run"], tmp_path / "b")
    folder = tmp_path / "b" / "run" / "checkpoint"
    assert (folder / "meter-2.json").read_bytes() == (folder / "progress.json").read_bytes() == b"2"


def test_a_file_is_whole_or_absent(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write("run/summary.json", b"old")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(store._files, "mv", fail)
    with pytest.raises(OSError, match="full"):
        store.write("run/summary.json", b"new")
    assert store.read("run/summary.json") == b"old"
    assert store._list("run") == ["summary.json"]


@pytest.mark.parametrize("url", ["nonsense://bucket", "adl://bucket/runs"])
def test_unusable_urls(url: str) -> None:
    with pytest.raises(ValueError, match="cannot be used to store runs"):
        Store(url)
