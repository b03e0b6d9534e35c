"""`moetta run`: one cell or a few, on any stream and model."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from moetta.bench.cell import Cell, grid, parse_overrides
from moetta.bench.grid import finished, require_all
from moetta.commands.console import make_console
from moetta.commands.options import Running, write_report
from moetta.commands.results import groups_tables
from moetta.results.runs import load_run


@dataclass(frozen=True)
class RunOptions(Running):
    """Run methods over streams of images; every result gets a card that says what was run.

    Each of method, stream, model and seeds may name several: all combinations are run.
    """

    method: tuple[str, ...] = ("moetta",)
    """Methods; `moetta methods` lists them."""
    stream: tuple[str, ...] = ("potpourri+",)
    """classical, potpourri, potpourri+, validation, cifar10-c; or a TOML mixture; or a folder of
    class folders."""
    model: tuple[str, ...] = ("digits-vit",)
    """Models: shipped, a timm name with tag, module:function, or a Hugging Face folder."""
    data: Path | None = None
    """Folder of the data sets (imagenet-c and so on); without it the embedded benchmark is used."""
    weights: Path | None = None
    """Load the model's weights from this safetensors file."""
    seeds: tuple[int, ...] = (42,)
    """Seeds of the stream's order and of the methods' own draws."""
    set: tuple[str, ...] = ()
    """Fields of the methods' configuration, as in lr=1e-3 experts=11."""
    preset: str | None = None
    """Where the configuration starts; by default what suits the model and the stream."""
    limit: int | None = None
    """Use only this many images, a stratified subset."""
    batch_size: int | None = None
    """Images in a batch: by default 64, or what a mixture's file says."""
    order: str | None = None
    """How domains arrive: mixed, continual, gradual, label_shift or bursts."""
    severity: int = 5
    """Severity of the corruptions."""
    preprocess: str = "model"
    """Resize and crop as the model's config says, or as the paper did."""
    mean: tuple[float, float, float] | None = None
    """Mean by channel, for a model that does not say what it expects."""
    std: tuple[float, float, float] | None = None
    """Standard deviation by channel, with --mean."""
    size: int | None = None
    """Side of the pictures, with --mean."""
    mask: bool = False
    """Score ImageNet-R and -A among their 200 classes (the paper does not)."""
    partial: bool = False
    """Accept data sets that lack images."""
    on_error: str = "fail"
    """What to do at an image that cannot be read: fail, or skip it (named and counted)."""
    frost_folder: Path | None = None
    """Folder of ImageNet-C's six frost photographs; by default frost has a texture of our own."""
    source: Path | None = None
    """Folder of clean images, for methods that look at some (eata, mgtta) on your own data."""
    source_images: int = 2000
    """How many clean images such a method sees."""
    report: Path | None = None
    """Also write an HTML page of these runs."""


def run(options: RunOptions) -> None:
    """Run the cells, print a table."""
    wanted = cells(options)
    outcomes = options.run(wanted)
    runs = [load_run(folder) for folder in finished(outcomes)]
    if runs and not options.json:
        make_console().print(*groups_tables(runs))
        print(f"results in {options.out}; moetta report {options.out} makes a page of them")
    if runs and options.report is not None:
        page = write_report(finished(outcomes), options.report)
        if page is not None:
            print(f"report: {page}", file=sys.stderr if options.json else sys.stdout)
    require_all(wanted, outcomes)  # what failed is told below what did not


def cells(options: RunOptions) -> list[Cell]:
    """The grid that the options describe."""
    if (options.mean is None) != (options.std is None):
        raise ValueError("give --mean and --std together")
    normalise = None
    if options.mean is not None and options.std is not None:
        normalise = (options.mean, options.std)
    overrides, variant = parse_overrides(options.set), ",".join(options.set) or None
    made = grid(
        model=list(options.model),
        stream=list(options.stream),
        method=list(options.method),
        seed=list(options.seeds),
        preset=options.preset,
        data=_text(options.data),
        weights=_text(options.weights),
        limit=options.limit,
        batch_size=options.batch_size,
        preprocess=options.preprocess,
        normalise=normalise,
        size=options.size,
        order=options.order,
        severity=options.severity,
        mask=options.mask,
        partial=options.partial,
        on_error=options.on_error,
        frost_folder=_text(options.frost_folder),
        source=_text(options.source),
        source_images=options.source_images,
        loaders=options.loaders,
        device=options.device,
        threads=options.threads,
    )
    return [  # noadapt has nothing to set, and stands beside the others all the same
        cell if cell.method == "noadapt" else replace(cell, overrides=overrides, variant=variant)
        for cell in made
    ]


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
