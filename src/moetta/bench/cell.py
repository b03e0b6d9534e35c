"""A cell: one planned run as plain data, with everything that decides its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import torch

from moetta.core.config import Config
from moetta.data.catalogue import is_stream, stream_names, stream_spec
from moetta.methods import find
from moetta.suggest import nearest, nearest_path
from moetta.zoo import RECIPES, tuned

BASELINE = "noadapt"
"""The method that every other one is compared with: the source model, not adapted."""
DEVICES = ("cpu", "cuda", "mps")

# The text under each field is also the help of its command-line option.


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which data and weights a cell uses."""

    data: str | None = None
    """Folder of the data sets (imagenet-val, imagenet-c and so on, or CIFAR-10); without it the
    embedded benchmark is used."""
    weights: str | None = None
    """Load the model's weights from this safetensors file."""
    limit: int | None = None
    """Use only this many images of the stream, a stratified subset."""
    length: int | None = None
    """Make the stream this many images long: an embedded one may also be longer than usual."""
    batch_size: int | None = None
    """Images per batch; by default 64, or what a mixture file says."""
    partial: bool = False
    """Accept data sets with missing images."""


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """Where and how a cell is computed."""

    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, mps."""
    threads: int | None = field(default=None, compare=False)
    """CPU threads per run; by default all cores, divided among the workers."""
    loaders: int = 0
    """Processes per run that read images ahead; with 0 the run reads them itself."""


@dataclass(frozen=True, kw_only=True)
class CellOptions(ComputeOptions, DataOptions):
    """Everything about a cell except its method, stream, model and seed."""

    preset: str | None = None
    """Where the method's configuration starts; by default what suits the model and the stream."""
    order: str | None = None
    """How domains arrive: mixed, continual, gradual, label_shift or bursts; by default the
    stream's own order."""
    severity: int = 5
    """Severity of the corruptions, 1 to 5."""
    preprocess: str = "model"
    """Resize and crop as the model's config says (model) or as the paper did (paper)."""
    mean: tuple[float, float, float] | None = None
    """Mean per channel, for a model that does not say what input it expects."""
    std: tuple[float, float, float] | None = None
    """Standard deviation per channel, with --mean."""
    size: int | None = None
    """Side of the images in pixels, with --mean."""
    mask: bool = False
    """Score ImageNet-R and ImageNet-A among their 200 classes (the paper does not)."""
    on_error: str = "fail"
    """What to do with an image that cannot be read: fail, or skip it (it is named and counted)."""
    frost_folder: str | None = None
    """Folder of ImageNet-C's six frost photographs; by default frost uses a generated texture."""
    source: str | None = None
    """Folder of source images, for methods that look at some (eata, mgtta) on your own data."""
    source_images: int = 2000
    """How many source images such a method sees."""


@dataclass(frozen=True)
class Cell(CellOptions):
    """One planned run: a method on a stream with a model and a seed.

    Attributes:
        method: a method's name, or ``module:Class``.
        stream: a named stream, the path of a TOML mixture, or a folder of class folders.
        model: a shipped model, a timm name with its tag, ``module:function``, or a Hugging Face
            folder.
        seed: seed of the stream's order and of the method's random draws.
        overrides: fields of the method's configuration, as (name, value) pairs.
        variant: what the results call a cell with overrides.
        experiment: the experiment of the paper that it was first run for.
    """

    method: str
    stream: str
    model: str
    seed: int = 42
    overrides: tuple[tuple[str, Any], ...] = ()
    variant: str | None = None
    experiment: str | None = None

    @property
    def label(self) -> str:
        """A short name for displays."""
        parts = [self.method, self.variant, self.stream_name, self.model_name, f"s{self.seed}"]
        return " ".join(part for part in parts if part)

    @property
    def stream_name(self) -> str:
        """The stream's name in results."""
        return self.stream if is_named(self) else Path(self.stream).stem

    @property
    def model_name(self) -> str:
        """The model's name in results."""
        return Path(self.model).name if "/" in self.model else self.model

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Cell:
        """The cell that a run's `card.json` describes, to run it again."""
        values = {name: _tuples(value) for name, value in card["cell"].items()}
        if "normalise" in values:  # cards up to version 0.1
            values["mean"], values["std"] = values.pop("normalise") or (None, None)
        return cls(**values)

    def check(self) -> None:
        """Refuse misspelt names and values out of range before anything is loaded.

        Raises:
            ValueError: a name or value is wrong; names the nearest valid ones.
            FileNotFoundError: there is no such mixture file, weights file or data folder.
        """
        resolve_config(self)
        _check_device(self.device)
        if self.preprocess not in ("model", "paper"):
            hint = nearest(self.preprocess, ("model", "paper"))
            raise ValueError(f"no preprocessing {self.preprocess!r}; {hint}")
        if (self.mean is None) != (self.std is None):
            raise ValueError("give --mean and --std together")
        if self.limit is not None and self.length is not None:
            raise ValueError("give --limit or --length, not both")
        _check_effective(self)
        _check_paths(self)


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in DEVICES:
        raise ValueError(f"no device {name!r}; valid: {', '.join(DEVICES)}, cuda:1 and so on")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"no device {name!r} here: torch sees {count} CUDA devices; use cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"no device {name!r} here: it needs a Mac with Metal; use cpu")


def _check_effective(cell: Cell) -> None:
    """Refuse options that the stream would silently ignore."""
    if cell.on_error not in ("fail", "skip"):
        raise ValueError(f"on_error must be 'fail' or 'skip', got {cell.on_error!r}")
    given = {
        "mask": cell.mask,
        "severity": cell.severity != 5,
        "frost_folder": cell.frost_folder is not None,
        "preprocess": cell.preprocess != "model",
        "normalise": cell.mean is not None,
        "size": cell.size is not None,
        "partial": cell.partial,
        "on_error": cell.on_error == "skip",
    }
    known = given.keys() - {"mask", "severity"}  # on the user's own folder or mixture
    kind = "your own folder or mixture"
    if is_named(cell):
        spec = stream_spec(cell.stream, cell.data)
        known = set(spec.options)
        kind = f"the stream {cell.stream!r}"
        kind += " of the embedded benchmark" if spec.embedded else ""
    for name in given:
        if given[name] and name not in known:
            flag = {"normalise": "mean", "on_error": "on-error skip"}.get(name, name)
            flag = flag.replace("_", "-")
            raise ValueError(f"--{flag} has no effect on {kind}: leave it out")


def _check_paths(cell: Cell) -> None:
    path = Path(cell.stream)
    if path.suffix == ".toml":
        if not path.is_file():
            raise FileNotFoundError(f"there is no mixture file {path}{nearest_path(path)}")
    elif not is_named(cell) and not path.is_dir():
        if cell.data is None and is_stream(cell.stream, "data"):
            raise ValueError(
                f"stream {cell.stream!r} needs --data, the folder of its data sets; without it "
                f"there are the embedded streams: {', '.join(stream_names(embedded=True))}"
            )
        known = stream_names(embedded=cell.data is None)
        raise ValueError(
            f"no stream {cell.stream!r}; {nearest(cell.stream, known)} (or the path of a TOML "
            "mixture, or of a folder with one folder per class)"
        )
    if cell.weights is not None and not Path(cell.weights).is_file():
        hint = nearest_path(Path(cell.weights))
        raise FileNotFoundError(f"there is no weights file {cell.weights}{hint}")
    if cell.data is not None and not Path(cell.data).is_dir():
        raise FileNotFoundError(_what_to_download(cell.stream, Path(cell.data)))


def _what_to_download(stream: str, data: Path) -> str:
    spec = stream_spec(stream if is_stream(stream, data) else "potpourri+", data)
    lines = [f"- {text}" for text in spec.to_download(data)]
    return "\n".join([f"there is no data folder {data}{nearest_path(data)}; make it, with", *lines])


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def is_named(cell: Cell) -> bool:
    """Whether the stream has a name, rather than being the user's own file or folder."""
    return is_stream(cell.stream, cell.data)


def resolve_config(cell: Cell) -> tuple[str, Config]:
    """The name of a cell's preset, and its whole configuration.

    Shipped models start from the values tuned for them, all others from what the method prefers
    for the stream.
    """
    method = find(cell.method)
    start: dict[str, Any] = {}
    name = preset = cell.preset or "paper"
    if cell.preset is None and cell.model in RECIPES:
        start = tuned(cell.model, cell.method)
        name = "tuned" if start else "paper"
    elif cell.preset is None:
        name = preset = method.preset_for(cell.stream if is_named(cell) else "")
    kinds, values = get_type_hints(method.config), {"seed": cell.seed, **start}
    for field_name, value in cell.overrides:
        # On a command line frozen=5 could be a number or text; only the field knows.
        text = type(value) is int and kinds.get(field_name) in (str, str | None)
        values[field_name] = str(value) if text else value
    return name, method.config.preset(preset, **values)
