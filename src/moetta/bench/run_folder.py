"""Writes a run's folder; the summary comes last and marks the run as complete."""

from __future__ import annotations

import io
import logging
import math
import statistics
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta.bench.cell import BASELINE
from moetta.bench.finished import is_finished
from moetta.bench.meter import QUARTERS, Meter
from moetta.bench.protocol import Prepared
from moetta.core.adapter import Adapter
from moetta.files import write_atomically, write_json
from moetta.results.runs import SCHEMA, load_card, load_run

CLEAN = ("clean", "imagenet")
"""Names of the domain whose images are like those the source model was trained on."""
log = logging.getLogger("moetta")


def has_card(folder: Path) -> bool:
    """Whether an earlier session left a readable card."""
    try:
        load_card(folder)
    except ValueError:
        return False
    return True


def write_frame(path: Path, frame: pl.DataFrame) -> None:
    """Write a table as Parquet, atomically."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    write_atomically(path, buffer.getvalue())


def write_run(
    folder: Path,
    prepared: Prepared,
    adapter: Adapter,
    meter: Meter,
    peak: int,
    skipped: list[dict[str, Any]],
) -> None:
    """Write all results of a run; the summary last, because it marks the run as complete."""
    steps, paired = steps_frame(meter), meter.paired
    baseline = folder.parent / prepared.baseline_key
    if prepared.cell.method != BASELINE and is_finished(baseline):
        try:
            steps, paired = _with_baseline(steps, meter, baseline)
        except (ValueError, OSError, RuntimeError, pl.exceptions.PolarsError) as error:
            log.warning("%s: %s; %s is compared on some batches only", baseline, error, folder.name)
    write_frame(folder / "steps.parquet", steps)
    write_frame(folder / "domains.parquet", domains_frame(meter))
    layers = list(adapter.expert_counts())
    if layers:
        write_frame(folder / "experts.parquet", experts_frame(meter, layers))
    if len(meter.similarity):
        experts = adapter.experts()
        write_frame(folder / "similarity.parquet", similarity_frame(meter, list(experts)))
        tensors: dict[str, Tensor] = {}
        for name, (weight, bias) in experts.items():
            tensors[f"{name}.weight"] = weight.detach().cpu().contiguous()
            tensors[f"{name}.bias"] = bias.detach().cpu().contiguous()
        write_atomically(folder / "experts.safetensors", to_bytes(tensors))
    summary = summarise(meter, adapter, steps, paired, peak)
    if skipped:
        summary["unread"] = skipped
    write_json(folder / "summary.json", summary)


def summarise(
    meter: Meter, adapter: Adapter, steps: pl.DataFrame, paired: Tensor, peak: int
) -> dict[str, Any]:
    """The run in a few numbers; accuracies are shares, forgetting is in percentage points."""
    counts, totals = meter.counts, adapter.totals
    samples = int(counts[..., 0].sum())
    both, ours, theirs = paired.sum((0, 1)).tolist()
    clean = [i for i, name in enumerate(meter.domains) if name in CLEAN]
    last_clean = paired[clean, QUARTERS - 1].sum(0)
    return {
        "schema": SCHEMA,
        "accuracy": int(counts[..., 1].sum()) / samples,
        "top5": int(meter.top5) / samples,
        "samples": samples,
        "steps": meter.rows,
        "by_domain": {
            name: {"accuracy": right / n if n else None, "samples": n}
            for name, (n, right) in zip(meter.domains, counts.sum(1).tolist(), strict=True)
        },
        "by_quarter": [share(right, n) for n, right in counts.sum(0).tolist()],
        "calibration_error": meter.calibration_error(),
        "clean_accuracy_first_quarter": _share_of(counts[clean, 0]),
        "clean_accuracy_last_quarter": _share_of(counts[clean, QUARTERS - 1]),
        "forgetting": (
            100 * int(last_clean[2] - last_clean[1]) / int(last_clean[0]) if last_clean[0] else None
        ),
        "first_gain_step": first_gain(steps),
        "noadapt_accuracy": share(theirs, both),
        "gain": share(ours - theirs, both),
        "cost": cost(meter, adapter, peak),
        "collapsed": collapsed(paired),
        "skipped_steps": totals.skipped,
        "finished": True,
    }


def cost(meter: Meter, adapter: Adapter, peak: int) -> dict[str, Any]:
    """What the run took; times are compared on the batches that the source model saw too.

    The ratio is a median, so that a process that was stopped for a while does not spoil it.
    """
    columns = meter.columns
    pairs = [
        (ours, theirs, n)
        for ours, theirs, n in zip(
            columns["seconds"], columns["seconds_noadapt"], columns["samples"], strict=True
        )
        if not math.isnan(theirs)
    ]
    pairs = pairs[1:] or pairs  # the first batch includes the warm-up
    totals = adapter.totals
    return {
        "seconds": meter.total("seconds"),
        "seconds_noadapt": statistics.median(t / n for _, t, n in pairs) * meter.total("samples"),
        "time_ratio": statistics.median(ours / theirs for ours, theirs, _ in pairs),
        "forwards": totals.forwards,
        "backwards": totals.backwards,
        "selected": totals.selected,
        "skipped": totals.skipped,
        "activated_parameters": adapter.activated_parameters,
        "peak_memory_bytes": peak,
    }


def collapsed(paired: Tensor) -> bool:
    """Whether the last quarter's accuracy is below half of the source model's."""
    seen = [q for q in range(QUARTERS) if int(paired[:, q, 0].sum())]
    if not seen:
        return False
    _, ours, theirs = paired[:, seen[-1]].sum(0).tolist()
    return bool(2 * ours < theirs)


def first_gain(steps: pl.DataFrame) -> int | None:
    """The first batch after which the run stays ahead of the source model in total correct."""
    both = steps.filter(pl.col("correct_noadapt").is_not_null())
    ahead = (both["correct"] - both["correct_noadapt"]).cum_sum() > 0
    if len(ahead) == 0 or not ahead[-1]:
        return None
    behind = (~ahead).arg_true()
    return int(both["step"][int(behind[-1]) + 1 if len(behind) else 0])


def share(part: int, whole: int) -> float | None:
    """A fraction, or None if the whole is 0."""
    return part / whole if whole else None


def _share_of(counts: Tensor) -> float | None:
    n, right = counts.sum(0).tolist()
    return share(right, n)


def _with_baseline(
    steps: pl.DataFrame, meter: Meter, baseline: Path
) -> tuple[pl.DataFrame, Tensor]:
    """Compare with noadapt's own run on the same stream, on every batch and domain."""
    run = load_run(baseline)
    known = run.frame("steps").select("step", "correct")
    joined = steps.drop("correct_noadapt").join(
        known.rename({"correct": "correct_noadapt"}), on="step", how="left", maintain_order="left"
    )
    theirs = run.frame("domains")["correct"]
    right = torch.tensor(theirs.to_list()).view(len(meter.domains), QUARTERS, 1)
    return joined.select(steps.columns), torch.cat((meter.counts, right), 2)


def steps_frame(meter: Meter) -> pl.DataFrame:
    """One row per batch."""
    frame = pl.DataFrame(meter.columns).fill_nan(None)
    whole = ("step", "samples", "correct", "correct_noadapt")
    return frame.with_columns(pl.col(whole).cast(pl.Int64))


def domains_frame(meter: Meter) -> pl.DataFrame:
    """Samples and correct predictions by domain and quarter of the stream."""
    rows = [
        (name, quarter, *meter.counts[i, quarter].tolist())
        for i, name in enumerate(meter.domains)
        for quarter in range(QUARTERS)
    ]
    return pl.DataFrame(rows, schema=["domain", "quarter", "samples", "correct"], orient="row")


def experts_frame(meter: Meter, layers: list[str]) -> pl.DataFrame:
    """How many samples of each domain went to each expert, by layer and quarter."""
    rows = [
        (quarter, layers[layer], meter.domains[domain], expert, count)
        for quarter, by_layer in enumerate(meter.routing.tolist())
        for layer, by_domain in enumerate(by_layer)
        for domain, by_expert in enumerate(by_domain)
        for expert, count in enumerate(by_expert)
    ]
    names = ["step_bucket", "layer", "domain", "expert", "count"]
    return pl.DataFrame(rows, schema=names, orient="row")


def similarity_frame(meter: Meter, layers: list[str]) -> pl.DataFrame:
    """How similar the experts of each layer were along the stream."""
    rows = [
        (int(step), name, weight, bias)
        for moment in meter.similarity.tolist()
        for name, (step, weight, bias) in zip(layers, moment, strict=True)
    ]
    names = ["step", "layer", "weight_cosine", "bias_cosine"]
    return pl.DataFrame(rows, schema=names, orient="row").fill_nan(None)
