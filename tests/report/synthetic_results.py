"""Results folders as the benchmark writes them, with made-up but plausible numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

# Method: accuracy at the end, time ratio, forwards, backwards (as shares of the samples).
METHODS: dict[str, tuple[float, float, float, float]] = {
    "noadapt": (0.559, 1.0, 1.0, 0.0),
    "tent": (0.623, 2.3, 1.0, 1.0),
    "eata": (0.632, 2.4, 1.0, 0.8),
    "cotta": (0.593, 8.0, 2.0, 1.0),
    "sar": (0.600, 4.4, 2.0, 1.75),
    "deyo": (0.629, 3.2, 1.96, 0.53),
    "mgtta": (0.644, 2.3, 1.0, 1.0),
    "becotta": (0.589, 3.3, 1.0, 0.86),
    "moetta": (0.662, 2.5, 1.0, 0.76),
}
TITLES = {
    "noadapt": "No adaptation",
    "tent": "Tent",
    "eata": "EATA",
    "cotta": "CoTTA",
    "sar": "SAR",
    "deyo": "DeYO",
    "mgtta": "MGTTA",
    "becotta": "BECoTTA",
    "moetta": "MoETTA",
}
DRAWN = {
    "noadapt": {"color": "#6b7077", "marker": "o"},
    "tent": {"color": "#b8327d", "marker": "s"},
    "moetta": {"color": "#0b5cad", "marker": "*"},
}
SEEDS = (42, 4242, 424242)
DOMAINS = [
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur"),
    *("motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast"),
    *("elastic_transform", "pixelate", "jpeg_compression", "rendition", "sketch"),
    *("adversarial", "clean"),
]
LAYERS = [f"blocks.{block}.norm{half}" for block in range(6) for half in (1, 2)] + ["norm"]
EXPERTS = 9


def write_run(
    root: Path,
    method: str = "moetta",
    seed: int = 42,
    *,
    stream: str = "embedded-potpourri+",
    model: str = "digits-vit",
    variant: str | None = None,
    accuracy: float | None = None,
    batch_size: int = 64,
    steps: int = 120,
    config: dict[str, Any] | None = None,
    domains: list[str] | None = None,
    created: str = "2026-11-16T02:00:00+00:00",
    name: str | None = None,
) -> Path:
    """One finished run; equal arguments give equal files."""
    names = domains or DOMAINS
    target, ratio, forwards, backwards = METHODS.get(method, METHODS["tent"])
    target = target if accuracy is None else accuracy
    rng = np.random.default_rng([seed, sum(map(ord, method + (variant or "") + stream + model))])
    base_rate = METHODS["noadapt"][0]
    n = steps * batch_size
    rise = 1 - np.exp(-np.arange(steps) / (steps / 8))
    rates = np.clip(base_rate + (target - base_rate) * rise + rng.normal(0, 0.002), 0.001, 0.999)
    if method == "noadapt":
        rates[:] = base_rate
    correct = rng.binomial(batch_size, rates)
    base = correct if method == "noadapt" else rng.binomial(batch_size, base_rate, steps)
    rows = np.arange(steps)
    step_frame = pl.DataFrame(
        {
            "step": rows,
            "samples": np.full(steps, batch_size),
            "correct": correct,
            "correct_noadapt": base,
            "entropy": 1.2 - 0.5 * rise,
            "selected_share": np.full(steps, backwards),
            "seconds": np.full(steps, 0.02 * ratio),
            "loss_entropy": 1.0 - 0.4 * rise,
        }
    )
    hardness = np.sin(np.arange(len(names)) * 1.7) * 0.18
    domain_rows = []
    for quarter in range(4):
        rate = float(rates[quarter * steps // 4 : (quarter + 1) * steps // 4].mean())
        for place, domain in enumerate(names):
            count = n // (4 * len(names))
            hit = rng.binomial(count, np.clip(rate + hardness[place], 0.01, 0.99))
            domain_rows.append((domain, quarter, count, int(hit)))
    domain_frame = pl.DataFrame(
        domain_rows, schema=["domain", "quarter", "samples", "correct"], orient="row"
    )
    by_domain = {
        d: {
            "accuracy": sum(r[3] for r in domain_rows if r[0] == d)
            / sum(r[2] for r in domain_rows if r[0] == d),
            "samples": sum(r[2] for r in domain_rows if r[0] == d),
        }
        for d in names
    }
    measured = float(correct.sum() / n)
    card = {
        "schema": 1,
        "moetta": "0.1.0",
        "method": method,
        "title": TITLES.get(method, method),
        "preset": "paper",
        "config": {"lr": 1e-3, "seed": seed, **(config or {})},
        "variant": variant,
        "experiment": None,
        "protocol": {
            "model": {"name": model, "weights_sha256": "ab" * 32, "parameters": 412_345},
            "preprocess": {"mean": [0.5] * 3, "std": [0.25] * 3, "size": [32, 32]},
            "stream": {
                "stream": stream,
                "domains": [{"name": d, "samples": n // len(names)} for d in names],
                "samples": n,
                "order": {"name": "mixed"},
                "seed": seed,
                "batch_size": batch_size,
                "limit": None,
                "corruption_seed": 0,
            },
            "source": {"images": 200, "from": "embedded training digits"},
            "mask": False,
            "reset": "never",
            "scored": "before update",
        },
        "seed": seed,
        "versions": {"python": "3.11", "torch": "2.6", "timm": "1.0", "moetta": "0.1.0"},
        "device": "cpu",
        "threads": 1,
        "created": created,
    }
    summary = {
        "schema": 1,
        "accuracy": measured,
        "top5": min(1.0, measured + 0.2),
        "samples": n,
        "steps": steps,
        "by_domain": by_domain,
        "by_quarter": [
            float(part.sum() / (len(part) * batch_size)) for part in np.array_split(correct, 4)
        ],
        "calibration_error": 0.08,
        "clean_accuracy_first_quarter": 0.9,
        "clean_accuracy_last_quarter": 0.89,
        "forgetting": 1.0,
        "first_gain_step": None if method == "noadapt" else 7,
        "noadapt_accuracy": float(base.sum() / n),
        "gain": measured - float(base.sum() / n),
        "cost": {
            "seconds": 0.02 * ratio * steps,
            "seconds_noadapt": 0.02 * steps,
            "time_ratio": ratio * float(1 + rng.normal(0, 0.01)) if ratio > 1 else 1.0,
            "forwards": round(forwards * n),
            "backwards": round(backwards * n),
            "selected": round(backwards * n),
            "skipped": 0,
            "activated_parameters": 0 if method == "noadapt" else 38_400,
            "peak_memory_bytes": 180_000_000,
        },
        "collapsed": measured < base_rate / 2,
        "finished": True,
    }
    if method in DRAWN:
        card["drawn"] = DRAWN[method]
    tail = f"__{variant}" if variant else ""
    folder = root / (name or f"{model}__{stream}__{method}{tail}__s{seed}__{batch_size:08x}")
    folder.mkdir(parents=True)
    step_frame.write_parquet(folder / "steps.parquet")
    domain_frame.write_parquet(folder / "domains.parquet")
    if method in ("moetta", "becotta"):
        _routing(rng, names, n).write_parquet(folder / "experts.parquet")
    if method == "moetta":
        _similarity(rng, steps).write_parquet(folder / "similarity.parquet")
    (folder / "card.json").write_text(json.dumps(card))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _routing(rng: np.random.Generator, names: list[str], samples: int) -> pl.DataFrame:
    rows = []
    for depth, layer in enumerate(LAYERS):
        focus = 3.0 * np.exp(-((depth - 7) ** 2) / 12)
        for place, domain in enumerate(names):
            preference = np.exp(focus * rng.normal(0, 1, EXPERTS) + (place % EXPERTS == 0))
            for bucket in range(4):
                share = rng.dirichlet(preference / preference.sum() * 40 + 0.01)
                counts = rng.multinomial(samples // (4 * len(names)), share)
                for expert, count in enumerate(counts):
                    rows.append((bucket, layer, domain, expert, int(count)))
    schema = ["step_bucket", "layer", "domain", "expert", "count"]
    return pl.DataFrame(rows, schema=schema, orient="row")


def _similarity(rng: np.random.Generator, steps: int) -> pl.DataFrame:
    rows = []
    for depth, layer in enumerate(LAYERS):
        low = rng.uniform(0.1, 0.7) * (1 - depth / 30)
        for step in np.linspace(1, steps, 40).astype(int):
            value = low + (1 - low) * float(np.exp(-step / (steps / 5)))
            rows.append((int(step), layer, value, value * 0.9))
    schema = ["step", "layer", "weight_cosine", "bias_cosine"]
    return pl.DataFrame(rows, schema=schema, orient="row")


def one_run(root: Path) -> Path:
    write_run(root)
    return root


def nine_methods(root: Path, seeds: tuple[int, ...] = SEEDS, **options: Any) -> Path:
    for method in METHODS:
        for seed in seeds:
            write_run(root, method, seed, **options)
    return root


def hundred_runs(root: Path) -> Path:
    """Three streams and two models by all methods, and a sweep of variants: 102 runs."""
    for model in ("digits-vit", "digits-convnext"):
        for stream in ("classical", "potpourri", "potpourri+"):
            nine_methods(root, (42,), model=model, stream=f"embedded-{stream}", steps=40)
    for index in range(48):
        experts, weight = 2 + index % 8, 0.05 * (1 + index // 8)
        write_run(
            root,
            variant=f"experts={experts},balance={weight:.2f}",
            accuracy=0.6 + 0.001 * index,
            config={"experts": experts, "balance": weight},
            steps=40,
        )
    return root


def broken_runs(root: Path) -> Path:
    """Two good runs, and one of each kind of damage."""
    write_run(root, "noadapt")
    write_run(root, "tent")
    write_run(root, "eata", name="bad-card").joinpath("card.json").write_text('{"schema": 1, "me')
    write_run(root, "sar", name="unfinished").joinpath("summary.json").unlink()
    write_run(root, "deyo", name="bad-steps").joinpath("steps.parquet").write_bytes(b"PAR1 no")
    experts = write_run(root, "moetta", name="bad-experts") / "experts.parquet"
    experts.write_bytes(experts.read_bytes()[:200])
    card = write_run(root, "cotta", name="old-schema") / "card.json"
    card.write_text(card.read_text().replace('"schema": 1', '"schema": 99'))
    return root


def mixed_runs(root: Path) -> Path:
    """Runs of one stream and model in two protocols: the batch size differs."""
    nine_methods(root, (42, 43))
    write_run(root, "tent", 42, batch_size=16)
    return root
