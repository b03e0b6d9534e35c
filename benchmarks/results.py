"""How long `moetta results` and `moetta report` take, on runs with made-up numbers.

    python benchmarks/results.py
    python benchmarks/results.py --runs 1000 --no-report

Compare CPU times: unlike the wall clock they hardly depend on other load on the machine. Before
results were read without torch, `moetta results` took 6.0 s of CPU on 270 runs and `moetta report`
53 s (two cores of a shared machine).
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from report.synthetic_results import METHODS, SEEDS, nine_methods, write_run

MOETTA = ("-m", "moetta.commands.main")


@dataclass(frozen=True)
class Options:
    """What to time."""

    runs: int = 300
    """How many runs to make."""
    repeats: int = 3
    """How often to time `moetta results`; the fastest counts."""
    report: bool = True
    """Also time `moetta report`."""


def make_runs(root: Path, count: int) -> None:
    """Two models on three streams with all methods and seeds, then variants of one method."""
    made = 0
    for model in ("digits-vit", "digits-convnext"):
        for stream in ("classical", "potpourri", "potpourri+"):
            if made + len(METHODS) * len(SEEDS) <= count:
                nine_methods(root, model=model, stream=f"embedded-{stream}")
                made += len(METHODS) * len(SEEDS)
    for number in range(count - made):
        variant = f"experts={2 + number // 3},balance=0.05"
        write_run(root, seed=SEEDS[number % 3], variant=variant, accuracy=0.6)


def timed(arguments: Sequence[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a Python process."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main(options: Options) -> None:
    """Make the runs and print a table of times."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        make_runs(root, options.runs)
        page = str(Path(folder) / "report.html")
        jobs: list[tuple[str, Sequence[str], int]] = [
            ("python -c pass", ("-c", "pass"), options.repeats),
            ("import tyro", ("-c", "import tyro"), options.repeats),
            ("import rich.table", ("-c", "import rich.table"), options.repeats),
            ("import polars", ("-c", "import polars"), options.repeats),
            ("import moetta.results", ("-c", "import moetta.results"), options.repeats),
            ("moetta results", (*MOETTA, "results", str(root)), options.repeats),
            ("moetta results --json", (*MOETTA, "results", str(root), "--json"), options.repeats),
        ]
        if options.report:
            jobs.append(("moetta report", (*MOETTA, "report", str(root), "-o", page), 1))
        print(f"{options.runs} runs{'':<18}{'wall s':>8}{'CPU s':>8}")
        for name, arguments, repeats in jobs:
            wall, cpu = min((timed(arguments) for _ in range(repeats)), key=lambda pair: pair[1])
            print(f"{name:<26}{wall:>8.2f}{cpu:>8.2f}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
