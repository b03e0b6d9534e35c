"""The domains of the embedded benchmark: their names, sizes and images.

An image depends only on its domain, its number and the severity. The usual images of a domain are
made all at once and kept in the user's cache folder. A longer domain continues with further images,
composed when they are needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from moetta.data.cache import LabelledImages, cached
from moetta.data.corruptions import CLASSICAL, EXTRA, corrupt
from moetta.data.domains import Domain
from moetta.data.embedded.compose import number_labels, photographs, scene
from moetta.data.embedded.styles import rendition, sketch

COUNTS = {"c": 960, "r": 576, "sketch": 977, "a": 144, "clean": 960, "extra": 3600}
"""Images per domain of each kind. The first five keep the paper's proportions (50,000 : 30,000 :
50,889 : 7,500 : 50,000); the validation stream is as long as the classical one, so that a learning
rate chosen on it suits a stream of that length."""

HARD_SEED = 105
# Seeds of the compositions of test digits; the corrupted images are the clean ones, corrupted.
_SEEDS = {"c": 101, "clean": 101, "extra": 102, "r": 103, "sketch": 104, "a": HARD_SEED}


def domain_names(kinds: Iterable[str]) -> tuple[str, ...]:
    """The domains of each kind: "c" and "extra" have one domain per corruption.

    >>> domain_names(["extra", "r"])[-2:]
    ('extra/saturate', 'r')
    """
    groups = {"c": CLASSICAL, "extra": EXTRA}
    return tuple(
        name
        for kind in kinds
        for name in ([f"{kind}/{corruption}" for corruption in groups.get(kind, ())] or [kind])
    )


def usual_count(name: str) -> int:
    """How many images a domain usually has."""
    return COUNTS[name.partition("/")[0]]


def domain(name: str, *, severity: int = 5, count: int | None = None) -> Domain:
    """One domain of the benchmark.

    Args:
        name: "c/" and one of the 15 corruptions, "extra/" and one of the 4 others, "r", "sketch",
            "a" or "clean".
        severity: Severity of the corruption, 1 to 5.
        count: How many images; by default the usual number. More are composed when they are needed,
            so that they take no memory.
    """
    known = domain_names(COUNTS)
    if name not in known:
        raise ValueError(
            f"the embedded benchmark has no domain {name!r}; valid: {', '.join(known)}"
        )
    if severity not in range(1, 6):
        raise ValueError(f"severity must be 1 to 5, got {severity!r}")
    usual = usual_count(name)
    wanted = usual if count is None else count
    is_corrupted = "/" in name
    origin = "embedded digits" + (f", severity {severity}" if is_corrupted else "")
    if wanted > usual:
        images = Compositions(name, severity, wanted)
        return Domain(name, images, images.labels(), origin=origin)
    stem = name.replace("/", "-") + (f"-{severity}" if is_corrupted else "")
    pixels, labels = cached(
        f"embedded-{fingerprint()}/{stem}", lambda: _compose(name, torch.arange(usual), severity)
    )
    return Domain(name, pixels[:wanted], labels[:wanted], origin=origin)


@dataclass(frozen=True)
class Compositions:
    """The images of a domain, composed when they are needed.

    Attributes:
        name: The domain.
        severity: Severity of its corruption.
        count: How many images it has.
    """

    name: str
    severity: int
    count: int

    def __post_init__(self) -> None:
        if self.name == "a" and self.count > len(hard_cases()):
            raise ValueError(
                f"the embedded benchmark has {len(hard_cases()):,} hard cases (domain 'a'), but "
                f"this length needs {self.count:,}; the stream 'classical' has no such limit"
            )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int, /) -> Tensor:
        return self.read_rows(torch.tensor([i]))[0]

    def read_rows(self, rows: Tensor) -> Tensor:
        """Several images at once, uint8 [n, 3, H, W]."""
        return _compose(self.name, rows, self.severity)[0]

    def labels(self) -> Tensor:
        """The labels of all images; no image is composed."""
        kind, index = self.name.partition("/")[0], torch.arange(self.count)
        return number_labels(hard_cases()[index] if kind == "a" else index, _SEEDS[kind])


@cache
def hard_cases() -> Tensor:
    """The numbers of the compositions with `HARD_SEED` that the independent model got wrong."""
    text = files("moetta.data.embedded").joinpath("hard.json").read_text()
    return torch.tensor(json.loads(text)["index"])


@cache
def fingerprint() -> str:
    """A hash of the code and data that make the images; each version has its cache folder."""
    here = Path(__file__).parent
    sources = [
        *here.glob("*.py"),
        *here.glob("*.json"),
        *(here.parent / "corruptions").glob("*.py"),
    ]
    total = hashlib.blake2b(digest_size=8)
    for file in sorted(sources, key=lambda f: (f.parent.name, f.name)):
        total.update(file.read_bytes())
    return total.hexdigest()


def _compose(name: str, index: Tensor, severity: int) -> LabelledImages:
    """The images of a domain with these numbers, and their labels."""
    kind, _, corruption = name.partition("/")
    seed = _SEEDS[kind]
    if kind in ("r", "sketch"):
        view = scene(index, split="test", seed=seed)
        return (rendition if kind == "r" else sketch)(view), view.labels
    chosen = hard_cases()[index] if kind == "a" else index
    images, labels = photographs(chosen, split="test", seed=seed)
    return (corrupt(images, corruption, severity, index=index) if corruption else images), labels
