"""Chooses each method's learning rate for the shipped models, on validation streams only.

One rule for all methods, fixed before any test stream was looked at. Everything but the rate is as
in the method's paper, except MoETTA's layers: the paper freezes the first few of 25 to 49 norm
layers, and the shipped models have too few to spare any.

1. The validation stream (four corruptions that no test stream has, severity 5) is as long as the
   test stream it stands for. Rates 1e-3, 3e-3, 1e-2, 3e-2 and 0.1 are screened with one seed, from
   the lowest up; above a rate that ends a whole point below noadapt and is no better than the next
   lower one, or has none below it, no rate is tried. A rate is a candidate only if neither it nor
   the next higher one ends below noadapt, over the whole stream or over its last quarter.
2. Candidates run with three seeds, the most accurate first, until two have passed: a rate drops out
   if in any seed its last quarter is below noadapt's.
3. Of those two, the rate with the higher gain over noadapt wins: its mean over the seeds minus its
   standard deviation. Low rates are not preferred.
4. If no rate passes, 3e-4 and then 1e-4 are added, and the climb goes on from them. If still none
   does, 1e-4 is taken, and the settings file says so.

The comparison with the next lower rate was added later, after digits-resnet had run on the test
streams: with BatchNorm a rate can start below noadapt, because the statistics of a batch are worse
than the stored ones, and rise from there. It changes no choice for the other models.

Trials are kept in a file: an interrupted search continues where it stopped, and several processes
may share the work. The choices for the models named are written to ``src/moetta/zoo/tuned.toml``.

    python benchmarks/tune.py --models digits-vit digits-convnext digits-resnet
    python benchmarks/tune.py --models cifar-vit cifar-convnext --data FOLDER_WITH_CIFAR10
    python benchmarks/tune.py --no-search --models digits-vit
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import re
import statistics
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

import moetta
from moetta import zoo
from moetta.data import Domain, Stream, cifar10, corrupted, embedded
from moetta.data.corruptions import EXTRA
from moetta.files import write_atomically
from moetta.methods import list_methods

ROOT = Path(__file__).parents[1]
HEADER = "# Written by benchmarks/tune.py from the validation streams.\n"
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
LOWER = (3e-4, 1e-4)
SEEDS = (42, 4242, 424242)
HOPELESS = 1.0  # points below noadapt at which a rate has to be better than the next lower one
LIMIT = {"digits": None, "cifar10": 4800}  # as long as the test streams of docs/results.md
OWN = ("moetta_plus",)  # settled on its own page

Trial = Mapping[str, Any]  # a line of the file


@dataclass(frozen=True)
class Tune:
    """What to search."""

    models: tuple[str, ...] = (
        "digits-vit",
        "digits-convnext",
        "digits-resnet",
        "cifar-vit",
        "cifar-convnext",
    )
    methods: tuple[str, ...] = ()
    """By default every method that has a learning rate."""
    data: Path | None = None
    """The folder of CIFAR-10, for models trained on it."""
    seeds: int = len(SEEDS)
    """How many seeds to search with; 1 is the screening alone, a first idea of the rates."""
    search: bool = True
    """Run missing trials; otherwise only print and write what the trials on file decide."""
    trials: Path = ROOT / "benchmarks" / "results" / "tune.jsonl"
    toml: Path = ROOT / "src" / "moetta" / "zoo" / "tuned.toml"
    threads: int = 1


# --- the rule -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A method's rate.

    Attributes:
        lr: the rate.
        gains: gain over noadapt in points, by seed.
        passed: whether it passed; otherwise it is the lowest rate there is.
    """

    lr: float
    gains: tuple[float, ...]
    passed: bool = True

    @property
    def score(self) -> float:
        """Mean gain minus its standard deviation over the seeds."""
        return statistics.mean(self.gains) - self.spread

    @property
    def spread(self) -> float:
        """Standard deviation of the gain over the seeds; 0 with one seed."""
        return statistics.stdev(self.gains) if len(self.gains) > 1 else 0.0

    def __str__(self) -> str:
        spread = f" ± {self.spread:.2f}" if len(self.gains) > 1 else ", one seed"
        gain = f"{statistics.mean(self.gains):+.2f}{spread}"
        return gain if self.passed else f"no rate passed, the lowest is taken: {gain}"


class Missing(Exception):
    """A trial that the rule asks for and nobody has run yet."""

    def __init__(self, lr: float, seed: int) -> None:
        super().__init__(lr, seed)
        self.lr, self.seed = lr, seed


def choose(
    tried: Mapping[tuple[float, int], Trial],
    none: Mapping[int, Trial],
    seeds: Sequence[int] = SEEDS,
) -> Choice:
    """The rate that the rule takes.

    Args:
        tried: a method's trials by rate and seed.
        none: noadapt's trials by seed.
        seeds: the seeds that a candidate has to pass; the first is the one for the screening.

    Raises:
        Missing: the next trial to run. Trials without quarters, of an older version, are enough to
            rule a rate out but not to take it.
    """
    first = seeds[0]

    def get(lr: float, seed: int, *, quarters: bool = True) -> Trial:
        trial = tried.get((lr, seed))
        if trial is None or (quarters and "quarters" not in trial):
            raise Missing(lr, seed)
        return trial

    def holds(lr: float, seed: int) -> bool:
        return bool(get(lr, seed)["quarters"][-1] >= none[seed]["quarters"][-1])

    def gain(lr: float, seed: int) -> float:
        return float(get(lr, seed)["accuracy"] - none[seed]["accuracy"])

    def candidates(rates: tuple[float, ...]) -> Iterator[float]:
        accuracy: dict[float, float] = {}
        floor = none[first]["accuracy"]
        below = math.inf if rates == RATES else -math.inf  # above an added rate, one is known
        for lr in rates:
            accuracy[lr] = get(lr, first, quarters=False)["accuracy"]
            if accuracy[lr] < floor - HOPELESS and accuracy[lr] <= below:
                break
            below = accuracy[lr]
        pairs = [p for p in pairwise(accuracy) if min(accuracy[lr] for lr in p) >= floor]
        for lr, higher in sorted(pairs, key=lambda pair: -accuracy[pair[0]]):
            if holds(higher, first) and holds(lr, first):
                yield lr

    rates: tuple[float, ...] = RATES
    for lower in (None, *LOWER):
        rates = rates if lower is None else (lower, *rates)
        passed: list[Choice] = []
        for lr in candidates(rates):
            if all(holds(lr, seed) for seed in seeds):
                passed.append(Choice(lr, tuple(gain(lr, seed) for seed in seeds)))
            if len(passed) == min(2, len(seeds)):  # with one seed, the screening has ranked them
                break
        if passed:
            return max(passed, key=lambda choice: choice.score)
    return Choice(rates[0], (gain(rates[0], first),), passed=False)


# --- trials -------------------------------------------------------------------------------------


def has_rate(method: str) -> bool:
    """Whether a method has a learning rate to choose."""
    return any(field.name == "lr" for field in fields(list_methods()[method].config))


def settings(method: str, lr: float) -> dict[str, Any]:
    """The fields of one trial."""
    fixed = {"frozen": "", "channels_first": True} if method == "moetta" else {}
    return {"lr": lr, **fixed} if has_rate(method) else {}


@cache
def cifar(data: Path) -> tuple[list[Domain], Tensor]:
    """CIFAR-10's test images under the extra corruptions, and 2,000 training images in [0, 1]."""
    drawn = next(iter(Stream([cifar10(data, "train")], seed=0, limit=2000, batch_size=2000,
                             normalise=((0, 0, 0), (1, 1, 1)))))  # fmt: skip
    return corrupted(cifar10(data, "test"), EXTRA), drawn.images


@cache
def validation(
    model: str, seed: int, data: Path | None
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """A model's validation stream in memory, and source images for the methods that need some."""
    recipe = zoo.recipe(model)
    limit = LIMIT[recipe.data]
    if recipe.data == "digits":
        stream = embedded.stream("validation", seed=seed, limit=limit)
        source = embedded.source_images(2000)
    else:
        if data is None:
            raise SystemExit(f"{model} needs --data, the folder of CIFAR-10")
        domains, source = cifar(data)
        stream = Stream(domains, seed=seed, limit=limit, normalise=(recipe.mean, recipe.std))
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (recipe.mean, recipe.std))
        source = (source - mean) / std
    return [(batch.images, batch.labels) for batch in stream], source


def run(model: str, method: str, lr: float, seed: int, data: Path | None) -> dict[str, Any]:
    """One pass over the validation stream, as a line of the file."""
    batches, source = validation(model, seed, data)
    key: dict[str, Any] = {"model": model, "weights": weights(model), "method": method}
    key |= {"fields": settings(method, lr), "limit": LIMIT[zoo.recipe(model).data], "seed": seed}
    needs = source if list_methods()[method].needs_source else None
    begun = time.perf_counter()
    adapter = moetta.adapt(zoo.load(model), method, source=needs, seed=seed, **key["fields"])
    right = torch.cat([adapter(images).argmax(1) == labels for images, labels in batches]).double()
    quarters = [round(100 * float(part.mean()), 3) for part in right.tensor_split(4)]
    return {
        **key,
        "accuracy": round(100 * float(right.mean()), 3),
        "samples": len(right),
        "quarters": quarters,
        "seconds": round(time.perf_counter() - begun, 1),
    }


@cache
def weights(model: str) -> str:
    """A model's weights as trials name them."""
    return str(zoo.card(model)["sha256"][:12])


def on_file(options: Tune) -> list[Trial]:
    """The trials that count: today's weights, streams as long as today's."""
    lines = options.trials.read_text().splitlines() if options.trials.exists() else []
    known = {m: (weights(m), LIMIT[zoo.recipe(m).data]) for m in zoo.available()}
    found = [json.loads(line) for line in lines if line]
    return [t for t in found if known.get(t["model"]) == (t["weights"], t["limit"])]


def tried(options: Tune, model: str, method: str) -> dict[tuple[float, int], Trial]:
    """One method's trials by rate and seed, those with quarters before older ones."""
    mine = [t for t in on_file(options) if (t["model"], t["method"]) == (model, method)]
    mine.sort(key=lambda trial: "quarters" in trial)
    expected = {
        (t["fields"].get("lr", 0.0), t["seed"]): t
        for t in mine
        if t["fields"] == settings(method, t["fields"].get("lr", 0.0))
    }
    return expected


def append(options: Tune, trial: Trial) -> None:
    """Add a line; other processes may do so too."""
    options.trials.parent.mkdir(parents=True, exist_ok=True)
    with options.trials.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(trial) + "\n")


@contextlib.contextmanager
def claimed(options: Tune, name: str) -> Iterator[bool]:
    """Whether this process got the part of that name; it keeps it until the block ends."""
    folder = options.trials.with_suffix(".locks")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def search(options: Tune, methods: list[str]) -> None:
    """Run what the rule asks for, model by model."""
    for model in options.models:
        for method in ("noadapt", *methods):
            with claimed(options, f"{model}-{method}") as got:
                if got:
                    settle(options, model, method)
        validation.cache_clear()  # a model's streams are large


def settle(options: Tune, model: str, method: str) -> None:
    """Run trials of one method until its rate is decided, or the model is refused."""

    def trial(lr: float, seed: int) -> None:
        done = run(model, method, lr, seed, options.data)
        append(options, done)
        print(f"{model} {method} {lr:g} seed {seed}: {done['accuracy']:.2f} {done['quarters']}"
              f" in {done['seconds']:.0f} s", flush=True)  # fmt: skip

    if method == "noadapt":
        for seed in SEEDS:
            if "quarters" not in tried(options, model, method).get((0.0, seed), {}):
                trial(0.0, seed)
        return
    while (none := baseline(options, model)) is None:  # another process is at it
        time.sleep(5)
    while True:
        try:
            choice = choose(tried(options, model, method), none, SEEDS[: options.seeds])
        except Missing as missing:
            try:
                trial(missing.lr, missing.seed)
            except ValueError as refusal:  # such as a method for ViTs only
                print(f"{model} {method}: {refusal}", flush=True)
                return
        else:
            print(f"{model} {method}: {choice.lr:g} ({choice})", flush=True)
            return


def baseline(options: Tune, model: str) -> dict[int, Trial] | None:
    """The trials of noadapt by seed, once all are there."""
    found = {s: t for (_, s), t in tried(options, model, "noadapt").items() if "quarters" in t}
    return found if len(found) == len(SEEDS) else None


# --- what is printed and written ----------------------------------------------------------------


def decided(options: Tune, model: str, methods: list[str]) -> dict[str, Choice]:
    """The rates that the trials on file decide, with one seed where three are not there yet."""
    none = baseline(options, model)
    found = {}
    for method in methods if none else []:
        assert none is not None
        for seeds in (SEEDS[:1], SEEDS):
            with contextlib.suppress(Missing):
                found[method] = choose(tried(options, model, method), none, seeds)
    return found


def table(options: Tune, model: str, methods: list[str]) -> str:
    """The screening as Markdown: accuracy by rate with the first seed, the chosen rate in bold."""
    choices, seed = decided(options, model, methods), SEEDS[0]
    rates = sorted({lr for m in methods for lr, _ in tried(options, model, m)})
    rows = [["method", *(f"{lr:g}" for lr in rates), "gain over noadapt"]]
    rows.append(["---"] * len(rows[0]))
    none = baseline(options, model)
    if none:
        first = f"{none[seed]['accuracy']:.2f}"
        rows.append(["noadapt", first, *[""] * len(rates)])
    for method in methods:
        mine, choice = tried(options, model, method), choices.get(method)
        row = [method]
        for lr in rates:
            trial = mine.get((lr, seed))
            text = "" if trial is None else f"{trial['accuracy']:.2f}"
            row.append(f"**{text}**" if choice is not None and lr == choice.lr else text)
        if mine:
            rows.append([*row, "not decided" if choice is None else str(choice)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def sections(text: str) -> dict[str, str]:
    """The parts of a settings file by model, with their notes."""
    found, owner = dict[str, str](), ""
    for line in text.splitlines(keepends=True):
        if start := re.match(r"(?:# |\[)([\w-]+)[.:]", line):
            owner = start[1]
        found[owner] = found.get(owner, "") + line
    return found


def write(options: Tune, methods: list[str]) -> None:
    """Write the choices for the models of the options; all else keeps its present settings."""
    before = options.toml.read_text() if options.toml.exists() else ""
    present, unchanged = tomllib.loads(before), sections(before)
    text = HEADER
    for model in zoo.available():
        if model not in options.models:
            text += unchanged.get(model, "")
            continue
        choices, none = decided(options, model, methods), baseline(options, model)
        if choices and none is not None:
            mean = statistics.mean(t["accuracy"] for t in none.values())
            images = none[SEEDS[0]]["samples"]
            text += f"# {model}: noadapt {mean:.2f} % on {images:,} images, {len(none)} seeds.\n"
        for method in methods:
            if method in choices:
                values = settings(method, choices[method].lr)
                note = str(choices[method])
            elif method in present.get(model, {}):
                values, note = present[model][method], "by an earlier rule"
            else:
                continue
            # JSON writes numbers, strings and booleans as TOML does.
            text += f"[{model}.{method}]  # {note}\n"
            text += "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())
    write_atomically(options.toml, text.encode())


def main(options: Tune) -> None:
    """Search, print the tables and write the settings."""
    torch.set_num_threads(options.threads)
    every = [m for m in list_methods() if has_rate(m) and m not in OWN]
    if options.search:
        search(options, list(options.methods) or every)
    for model in options.models:
        print(f"\n{model}\n\n{table(options, model, every)}")
    write(options, every)


if __name__ == "__main__":
    main(tyro.cli(Tune, description=__doc__))
