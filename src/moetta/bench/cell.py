"""A cell: all that decides the outcome of one run, as plain data; a grid is a list of them."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import torch

from moetta.core.config import Config
from moetta.data import STREAMS
from moetta.data.datasets import to_download
from moetta.data.embedded import STREAMS as EMBEDDED
from moetta.methods import find
from moetta.suggest import nearest, nearest_path
from moetta.zoo import RECIPES, tuned

POTPOURRI = ("potpourri", "potpourri+")
DEVICES = ("cpu", "cuda", "mps")


@dataclass(frozen=True)
class Cell:
    """One run: a method on a stream with a model and a seed.

    Attributes:
        method: a method's name.
        stream: a named stream, the path of a TOML mixture, or a folder of class folders.
        model: a shipped model, a timm name with tag, ``module:function``, or a Hugging Face folder.
        seed: of the stream's order and of the method's own draws.
        overrides: fields of the method's configuration, as (name, value) pairs.
        preset: where the fields start; None takes what suits the model and the stream.
        variant: what the results call a cell with overrides.
        experiment: which of the paper's experiments it was first run for.
        data: folder of the data sets; None is the embedded benchmark.
        weights: safetensors file with the model's weights.
        limit: a stratified subset of this many images.
        batch_size: images in a batch; None is 64, or what a mixture's file says.
        preprocess: "model" or "paper"; see `moetta.data.preprocess_for`.
        normalise: mean and std, for a model whose own config does not say.
        size: side of the pictures, for such a model.
        order: how domains arrive; None is the stream's own.
        severity: of the corruptions.
        mask: score ImageNet-R and -A among their 200 classes.
        partial: accept data sets that lack images.
        on_error: "fail" at a picture that cannot be read, or "skip" it, named and counted.
        frost_folder: folder of ImageNet-C's frost photographs; None is our own texture.
        source: folder of clean images, for streams that imply none.
        source_images: how many of them a method may look at.
        loaders: processes that read ahead.
        device: where to run.
        threads: torch threads; None leaves the choice to whoever runs the cell.
    """

    method: str
    stream: str
    model: str
    seed: int = 42
    overrides: tuple[tuple[str, Any], ...] = ()
    preset: str | None = None
    variant: str | None = None
    experiment: str | None = None
    data: str | None = None
    weights: str | None = None
    limit: int | None = None
    batch_size: int | None = None
    preprocess: str = "model"
    normalise: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    size: int | None = None
    order: str | None = None
    severity: int = 5
    mask: bool = False
    partial: bool = False
    on_error: str = "fail"
    frost_folder: str | None = None
    source: str | None = None
    source_images: int = 2000
    loaders: int = 0
    device: str = "cpu"
    threads: int | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        """A short name for displays."""
        parts = [self.method, self.variant, self.stream_name, self.model_name, f"s{self.seed}"]
        return " ".join(part for part in parts if part)

    @property
    def stream_name(self) -> str:
        """The stream as results call it."""
        return self.stream if is_named(self) else Path(self.stream).stem

    @property
    def model_name(self) -> str:
        """The model as results call it."""
        return Path(self.model).name if "/" in self.model else self.model

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Cell:
        """The cell that a run's `card.json` tells of, to run it again."""
        values = {name: _tuples(value) for name, value in card["cell"].items()}
        return cls(**values)

    def check(self) -> None:
        """Refuse a misspelt name or a value out of range before anything is loaded.

        Raises:
            ValueError: names the nearest valid ones.
            FileNotFoundError: there is no such stream file, weights file or data folder.
        """
        settings(self)
        _check_device(self.device)
        if self.preprocess not in ("model", "paper"):
            hint = nearest(self.preprocess, ("model", "paper"))
            raise ValueError(f"no preprocessing {self.preprocess!r}; {hint}")
        _check_effective(self)
        known = STREAMS if self.data else EMBEDDED
        path = Path(self.stream)
        if not is_named(self) and path.suffix != ".toml" and not path.is_dir():
            if self.stream in STREAMS and self.data is None:
                raise ValueError(
                    f"stream {self.stream!r} needs --data, the folder of its data sets; without it "
                    f"there are the embedded ones: {', '.join(EMBEDDED)}"
                )
            raise ValueError(
                f"no stream {self.stream!r}; {nearest(self.stream, known)} (or the path of a TOML "
                "mixture, or of a folder with one folder for each class)"
            )
        if path.suffix == ".toml" and not path.is_file():
            raise FileNotFoundError(f"there is no mixture file {path}{nearest_path(path)}")
        if self.weights is not None and not Path(self.weights).is_file():
            hint = nearest_path(Path(self.weights))
            raise FileNotFoundError(f"there is no weights file {self.weights}{hint}")
        if self.data is not None and not Path(self.data).is_dir():
            raise FileNotFoundError(_what_to_get(self.stream, Path(self.data)))


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in DEVICES:
        raise ValueError(f"no device {name!r}; valid: {', '.join(DEVICES)}, or cuda:1 and so on")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"no device {name!r} here: torch sees {count} CUDA devices; use cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"no device {name!r} here: it is a Mac's; use cpu")


def _what_to_get(stream: str, data: Path) -> str:
    parts = STREAMS.get(stream, STREAMS["potpourri+"])
    if "cifar10-c" not in parts:  # clean images are what eata and mgtta look at beforehand
        parts = tuple(dict.fromkeys((*parts, "val")))
    lines = [f"- {to_download(part, data)}" for part in parts]
    return "\n".join([f"there is no data folder {data}{nearest_path(data)}; make it, with", *lines])


def _check_effective(cell: Cell) -> None:
    """Refuse what the stream would silently ignore."""
    if cell.on_error not in ("fail", "skip"):
        raise ValueError(f"on_error must be 'fail' or 'skip', not {cell.on_error!r}")
    own = not is_named(cell)  # the user's folder or mixture
    embedded = cell.data is None and not own
    for name, given, without in (
        ("mask", cell.mask, own or embedded or cell.stream == "cifar10-c"),
        ("severity", cell.severity != 5, own),
        ("frost-folder", cell.frost_folder is not None, embedded),
        ("preprocess", cell.preprocess != "model", embedded),
        ("mean", cell.normalise is not None, embedded),
        ("size", cell.size is not None, embedded),
        ("partial", cell.partial, embedded),
        ("on-error skip", cell.on_error == "skip", embedded),
    ):
        if given and without:
            kind = "a folder or mixture of your own" if own else f"the stream {cell.stream!r}"
            kind += " of the embedded benchmark" if embedded else ""
            raise ValueError(f"--{name} has no effect on {kind}: leave it out")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def is_named(cell: Cell) -> bool:
    """Whether the stream is one of the paper's, not a file or folder of the user's."""
    return cell.stream in (STREAMS if cell.data else EMBEDDED)


def settings(cell: Cell) -> tuple[str, Config]:
    """The name of a cell's preset and its whole configuration.

    The shipped models start from what was tuned for them, the paper's from the paper's values.
    """
    method = find(cell.method)
    start: dict[str, Any] = {}
    name = preset = cell.preset or "paper"
    if cell.preset is None and cell.model in RECIPES:
        start = tuned(cell.model, cell.method)
        name = "tuned" if start else "paper"
    elif cell.preset is None and cell.method == "moetta" and cell.stream in POTPOURRI:
        name = preset = "potpourri"
    kinds, values = get_type_hints(method.config), {"seed": cell.seed, **start}
    for field_name, value in cell.overrides:
        # frozen=5 on a command line is the text "5"; only the field knows.
        text = type(value) is int and kinds.get(field_name) in (str, str | None)
        values[field_name] = str(value) if text else value
    return name, method.config.preset(preset, **values)


def parse_overrides(texts: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """``lr=1e-3`` and the like as (field, value) pairs; values are TOML, else plain text.

    >>> parse_overrides(["lr=1e-3", "select=false", "frozen=0-3"])
    (('lr', 0.001), ('select', False), ('frozen', '0-3'))
    """
    pairs: list[tuple[str, Any]] = []
    for text in texts:
        name, equals, raw = text.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"--set takes field=value, as in lr=1e-3, not {text!r}")
        try:
            value = tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            value = {"true": True, "false": False, "none": None}.get(raw.lower(), raw)
        pairs.append((name.strip(), tuple(value) if isinstance(value, list) else value))
    return tuple(pairs)


def grid(**axes: Any) -> list[Cell]:
    """All combinations: fields of `Cell`; those given as a list are varied, in order.

    >>> [c.label for c in grid(method=["tent", "sar"], stream="classical", model="digits-vit")]
    ['tent classical digits-vit s42', 'sar classical digits-vit s42']
    """
    names = {f.name for f in fields(Cell)}
    for name in axes:
        if name not in names:
            raise ValueError(f"a cell has no field {name!r}; {nearest(name, names)}")
    choices = [value if isinstance(value, list) else [value] for value in axes.values()]
    return [Cell(**dict(zip(axes, chosen, strict=True))) for chosen in itertools.product(*choices)]
