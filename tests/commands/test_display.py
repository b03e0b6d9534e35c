"""What people see while a grid runs."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from moetta.bench.cell import Cell
from moetta.bench.progress import Outcome, Progress
from moetta.commands import display
from moetta.commands.display import JSONLines, Lines, LiveTable
from moetta.commands.reproduce import print_table
from moetta.results.tables import Column, Entry, Table
from report.synthetic_results import write_run

TENT, SAR = (Cell(method, "classical", "digits-vit") for method in ("tent", "sar"))
NEWS = Progress(5, 10, 320, 640, accuracy=0.625, gain=0.0123, rate=100.4, eta=83.0)


@pytest.fixture
def done(tmp_path: Path) -> Outcome:
    """Half of 1,280 images right, in 2.0 s, with nothing to compare with."""
    folder = write_run(tmp_path, "tent", steps=20)
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    cost = {"seconds": 2.0, "time_ratio": 2.5}
    path.write_text(json.dumps({**summary, "accuracy": 0.5, "gain": 0.1, "cost": cost}))
    return Outcome(folder)


def test_lines(
    done: Outcome, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    lines = Lines(every=30)
    lines.begin([TENT, SAR])
    lines.update(TENT, NEWS)  # too early to tell
    now += 31
    lines.update(TENT, NEWS)
    lines.update(TENT, replace(NEWS, step=6))  # told a moment ago
    now += 31
    lines.update(TENT, replace(NEWS, step=7, gain=None, resumed=3))
    lines.finish(TENT, done)
    lines.finish(SAR, Outcome(error="out of luck"))
    lines.stop(1, 2)
    assert capsys.readouterr().out.splitlines() == [
        "2 runs",
        f"  {TENT.label}: batch 5/10, accuracy 62.50 % (+1.23 vs noadapt), 100 images/s, 1:23 left",
        f"  {TENT.label}: batch 7/10, accuracy 62.50 %, 100 images/s, 1:23 left, "
        "resumed at batch 3",
        f"[1/2] {TENT.label}: accuracy 50.00 % (+10.00 vs noadapt), 2.50 x noadapt's time",
        f"[2/2] {SAR.label}: failed: out of luck",
        "stopped after 1 of 2 runs; the same command resumes where it stopped",
    ]


def test_a_summary_may_lack_optional_figures(
    done: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    assert done.folder is not None
    path = done.folder / "summary.json"
    path.write_text(json.dumps({"schema": 1, "accuracy": 0.5, "samples": 1280}))
    lines = Lines()
    lines.begin([TENT])
    lines.finish(TENT, done)
    assert capsys.readouterr().out.splitlines()[-1] == f"[1/1] {TENT.label}: accuracy 50.00 %"
    table = LiveTable(Console(file=io.StringIO(), width=100))
    table.begin([TENT])
    table.finish(TENT, done)
    assert rows(table) == [[TENT.label, "done", "50.00", "", "", ""]]


def rows(table: LiveTable, height: int = 30) -> list[list[str]]:
    """The table's lines, field by field."""
    console = Console(file=io.StringIO(), width=100, height=height)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("│")]
    return [[field.strip() for field in line.strip("│").split("│")] for line in lines]


def test_the_live_table_follows_each_run_to_its_end(done: Outcome) -> None:
    out = io.StringIO()
    with LiveTable(Console(file=out, width=100, force_terminal=True)) as table:
        table.begin([TENT, SAR])
        assert rows(table) == [[c.label, "waiting", "", "", "", ""] for c in (TENT, SAR)]
        table.update(TENT, NEWS)
        assert rows(table)[0] == [TENT.label, "50 %", "62.50", "+1.23", "100", "1:23"]
        table.finish(TENT, done)
        table.finish(SAR, Outcome(error="out of luck"))
        table.stop(1, 2)
    assert rows(table) == [
        [TENT.label, "done", "50.00", "+10.00", "640", ""],
        [SAR.label, "failed", "", "", "", ""],
    ]
    assert "2 of 2 runs done" in out.getvalue()  # the final table stays on the screen
    assert "the same command resumes" in out.getvalue()


def test_brackets_in_a_name_are_not_taken_for_markup() -> None:
    table = LiveTable(Console(file=io.StringIO(), width=100))
    odd = replace(TENT, model="my[red]models:vit")
    table.begin([odd])
    assert rows(table) == [[odd.label, "waiting", "", "", "", ""]]
    console = Console(file=io.StringIO(), width=100)
    row = (Entry("[bold]a[/x]"),)
    print_table(console, Table("t", "of [red]", (Column("[b]"),), (row,), ("see [/x]",)))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert all(text in shown for text in ("[bold]a[/x]", "of [red]", "[b]", "see [/x]"))


def test_a_low_terminal_shows_the_runs_that_matter(done: Outcome) -> None:
    cells = [replace(TENT, seed=seed) for seed in range(20)]
    table = LiveTable(Console(file=io.StringIO(), width=100))
    table.begin(cells)
    for cell in cells[:10]:
        table.finish(cell, done)
    table.update(cells[10], NEWS)
    states = [row[1] for row in rows(table, height=12)]
    assert states == ["done"] * 3 + ["50 %"] + ["waiting"] * 2


def test_json_lines(done: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    lines = JSONLines()
    lines.begin([TENT])
    lines.update(TENT, NEWS)
    lines.update(TENT, NEWS)  # once a second is enough
    lines.finish(TENT, done)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["begin", "progress", "end"]
    assert events[1]["accuracy"] == 0.625
    assert events[2]["summary"]["accuracy"] == 0.5
