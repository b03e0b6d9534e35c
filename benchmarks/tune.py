"""Chooses each method's settings for the shipped models, on the validation stream only.

Every method gets one pass over the four extra corruptions at severity 5 per learning rate, from one
list for all. Everything else is as in the method's paper, except MoETTA's layers: the paper freezes
the first few of 25 to 49 norm layers, and the shipped models have too few to spare any.

The choice is cautious, and the same for every method: a rate is considered only if the next higher
one was tried and is not worse than noadapt, and the lowest rate within one standard error of the
best is taken. It is written to ``src/moetta/zoo/tuned.toml``. Finished trials are kept in a file,
so an interrupted search continues where it stopped.

    python benchmarks/tune.py --models digits-vit digits-convnext
    python benchmarks/tune.py --models cifar-vit cifar-convnext --data FOLDER_WITH_CIFAR10
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.progress import track

import moetta
from moetta import zoo
from moetta.data import Stream, cifar10, corrupted, embedded
from moetta.data.corruptions import EXTRA
from moetta.files import write_atomically
from moetta.methods import list_methods

ROOT = Path(__file__).parents[1]
HEADER = "# Written by benchmarks/tune.py from the validation streams.\n"


@dataclass(frozen=True)
class Tune:
    """What to search."""

    models: tuple[str, ...] = ("digits-vit", "digits-convnext")
    methods: tuple[str, ...] = tuple(m for m in list_methods() if m != "noadapt")
    lrs: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    limit: int | None = None
    """Images of the validation stream to use. By default all: it is as long as the classical
    stream, and a rate chosen on a shorter one may be too high."""
    seed: int = 42
    data: Path | None = None
    """The folder of CIFAR-10, for models trained on it."""
    trials: Path = ROOT / "benchmarks" / "results" / "tune.jsonl"
    toml: Path = ROOT / "src" / "moetta" / "zoo" / "tuned.toml"
    threads: int = 1


def candidates(method: str, options: Tune) -> list[dict[str, Any]]:
    """The settings to try for a method."""
    fixed = {"frozen": "", "channels_first": True} if method == "moetta" else {}
    return [{"lr": lr, **fixed} for lr in options.lrs]


def validation(model: str, options: Tune) -> tuple[Stream, torch.Tensor]:
    """A model's validation stream, and source images for the methods that need some."""
    recipe = zoo.recipe(model)
    if recipe.data == "digits":
        stream = embedded.stream("validation", seed=options.seed, limit=options.limit)
        return stream, embedded.source_images(2000)
    if options.data is None:
        raise SystemExit(f"{model} needs --data, the folder of CIFAR-10")
    clean = cifar10(options.data, "test")
    stream = Stream(
        corrupted(clean, EXTRA),
        seed=options.seed,
        limit=options.limit,
        normalise=(recipe.mean, recipe.std),
        name="cifar10-validation",
    )
    train = cifar10(options.data, "train")
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:2000]
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (recipe.mean, recipe.std))
    return stream, (train.images[chosen].float() / 255 - mean) / std


def accuracy(model: str, method: str, fields: dict, stream: Stream, source: torch.Tensor) -> float:
    """Accuracy on the stream, in percent."""
    needs = source if method in ("eata", "mgtta") else None
    adapter = moetta.adapt(zoo.load(model), method, source=needs, **fields)
    right = sum(int((adapter(b.images).argmax(1) == b.labels).sum()) for b in stream)
    return 100 * right / stream.samples


def search(options: Tune) -> list[dict]:
    """Runs the trials that are not on file yet, and returns all of them."""
    options.trials.parent.mkdir(parents=True, exist_ok=True)
    lines = options.trials.read_text().splitlines() if options.trials.exists() else []
    done = [json.loads(line) for line in lines]
    for model in options.models:
        weights = zoo.card(model)["sha256"][:12]
        wanted = [("noadapt", {})] + [
            (m, fields) for m in options.methods for fields in candidates(m, options)
        ]
        keys = [
            {"model": model, "weights": weights, "method": m, "fields": f, "limit": options.limit,
             "seed": options.seed}
            for m, f in wanted
        ]  # fmt: skip
        missing = [k for k in keys if not any(k.items() <= d.items() for d in done)]
        if not missing:
            continue
        stream, source = validation(model, options)
        for key in track(missing, description=model):
            score = accuracy(model, key["method"], key["fields"], stream, source)
            done.append({**key, "accuracy": round(score, 3), "samples": stream.samples})
            text = "".join(json.dumps(d) + "\n" for d in done)
            write_atomically(options.trials, text.encode())
    current = {m: zoo.card(m)["sha256"][:12] for m in zoo.available()}
    # Trials with other weights or on another part of the stream stay on file but do not count.
    return [
        d
        for d in done
        if current.get(d["model"]) == d["weights"]
        and (d["limit"], d["seed"]) == (options.limit, options.seed)
    ]


def chosen(tried: list[dict], none: float) -> dict:
    """The lowest rate within one standard error of the best, a step away from any that does harm.

    Args:
        tried: trials of one method.
        none: accuracy without adaptation.
    """
    tried = sorted(tried, key=lambda d: d["fields"]["lr"])
    safe = [d for d, higher in pairwise(tried) if higher["accuracy"] >= none] or tried[:1]
    best = max(safe, key=lambda d: d["accuracy"])
    share = best["accuracy"] / 100
    error = 100 * math.sqrt(share * (1 - share) / best["samples"])
    return next(d for d in safe if d["accuracy"] >= best["accuracy"] - error)


def kept(options: Tune) -> str:
    """What the settings file says about models that are not searched now."""
    text = options.toml.read_text() if options.toml.exists() else ""
    blocks = text.removeprefix(HEADER).split("\n# ")
    others = [b.removeprefix("# ").rstrip("\n") for b in blocks]
    return "".join(f"# {b}\n" for b in others if b and b.split(":")[0] not in options.models)


def main(options: Tune) -> None:
    """Searches, prints a table and writes the settings."""
    torch.set_num_threads(options.threads)
    trials = search(options)
    text = HEADER + kept(options)
    for model in options.models:
        mine = [d for d in trials if d["model"] == model]
        none = next(d["accuracy"] for d in mine if d["method"] == "noadapt")
        print(f"\n{model}: noadapt {none:.2f} % on the validation stream")
        images = mine[0]["samples"]
        text += f"# {model}: noadapt {none:.2f} % on {images:,} images.\n"
        for method in dict.fromkeys(d["method"] for d in mine if d["fields"]):
            tried = [d for d in mine if d["method"] == method]
            found = chosen(tried, none)
            row = "  ".join(f"{d['fields']['lr']:g}: {d['accuracy']:.2f}" for d in tried)
            print(f"  {method:8} {row}   chosen {found['fields']['lr']:g}")
            text += f"[{model}.{method}]  # {found['accuracy']:.2f} %\n"
            # JSON writes numbers, strings and booleans as TOML does.
            text += "".join(f"{k} = {json.dumps(v)}\n" for k, v in found["fields"].items())
    write_atomically(options.toml, text.encode())


if __name__ == "__main__":
    main(tyro.cli(Tune))
