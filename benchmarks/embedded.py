"""Every method on the embedded streams with the settings that were chosen on the validation stream.

    python benchmarks/embedded.py --models digits-vit --streams classical potpourri+

Prints accuracy in per cent, mean and sample standard deviation over the seeds, and the seconds that
one pass took. Finished runs are kept in a file and not repeated.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

import moetta
from moetta import sources
from moetta.data import embedded
from moetta.state import write_atomically


@dataclass(frozen=True)
class Table:
    """What is run."""

    models: tuple[str, ...] = ("digits-vit", "digits-convnext")
    methods: tuple[str, ...] = ("noadapt", "tent", "eata", "sar", "deyo", "moetta")
    streams: tuple[str, ...] = ("classical", "potpourri+")
    seeds: tuple[int, ...] = (42, 4242, 424242)
    runs: Path = Path(__file__).parent / "results" / "embedded.jsonl"
    threads: int = 1


def run(model: str, method: str, stream: str, seed: int) -> tuple[float, float]:
    """Accuracy in per cent over one pass, and its seconds."""
    source = embedded.source_images(2000) if method in ("eata", "mgtta") else None
    fields = sources.tuned(model, method)
    adapter = moetta.adapt(sources.load(model), method, source=source, **fields)
    data = embedded.stream(stream, seed=seed)
    begin = time.perf_counter()
    right = sum(int((adapter(b.images).argmax(1) == b.labels).sum()) for b in data)
    return 100 * right / data.samples, time.perf_counter() - begin


def main(options: Table) -> None:
    """Runs what is missing and prints a table for each model and stream."""
    torch.set_num_threads(options.threads)
    lines = options.runs.read_text().splitlines() if options.runs.exists() else []
    done = [json.loads(line) for line in lines]
    for model in options.models:
        weights = sources.card(model)["sha256"][:12]
        for stream in options.streams:
            print(f"\n{model}, {stream}")
            for method in options.methods:
                rows = []
                for seed in options.seeds:
                    key = {"model": model, "weights": weights, "stream": stream, "seed": seed}
                    key |= {"method": method, "fields": sources.tuned(model, method)}
                    row = next((d for d in done if key.items() <= d.items()), None)
                    if row is None:
                        accuracy, seconds = run(model, method, stream, seed)
                        row = {**key, "accuracy": round(accuracy, 3), "seconds": round(seconds, 1)}
                        done.append(row)
                        text = "".join(json.dumps(d) + "\n" for d in done)
                        options.runs.parent.mkdir(parents=True, exist_ok=True)
                        write_atomically(options.runs, text.encode())
                    rows.append(row)
                scores = [row["accuracy"] for row in rows]
                spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
                seconds = statistics.mean(row["seconds"] for row in rows)
                print(
                    f"  {method:8} {statistics.mean(scores):6.2f} ± {spread:.2f}   {seconds:5.1f} s"
                )


if __name__ == "__main__":
    main(tyro.cli(Table))
