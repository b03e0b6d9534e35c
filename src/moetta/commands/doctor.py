"""`moetta doctor`: what this machine offers, and whether the software works on it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.markup import escape
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import moetta
from moetta import zoo
from moetta.commands.console import make_console
from moetta.data import Preprocess
from moetta.data.cache import cache_folder
from moetta.data.datasets import readers

PACKAGES = (
    *("torch", "torchvision", "timm", "numpy", "safetensors", "tyro", "rich"),
    *("scikit-learn", "scipy", "matplotlib", "polars"),  # the extra "bench"
    "transformers",  # the extra "hf"
)


@dataclass(frozen=True)
class Doctor:
    """Check versions, devices, shipped weights and data folders; then run a short self-test."""

    data: Path = Path("data")
    """Folder to look for data sets in."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: what was looked at.
        good: whether it is in order; None if that is the user's choice.
        text: what was found.
    """

    topic: str
    good: bool | None
    text: str


def doctor(options: Doctor) -> None:
    """Check everything, and print the findings.

    Raises:
        ValueError: a check failed.
    """
    console = make_console()
    found = []
    for finding in examine(options.data):
        found.append(finding)
        if not options.json:
            mark = {True: "[green]ok[/green]", False: "[red]no[/red]", None: "--"}[finding.good]
            # The text may contain brackets, as in moetta[bench].
            console.print(f"{mark} {finding.topic}: {escape(finding.text)}", highlight=False)
    if options.json:
        print(json.dumps([vars(finding) for finding in found], indent=2))
    bad = [finding.topic for finding in found if finding.good is False]
    if bad:
        raise ValueError(f"these checks failed: {', '.join(bad)}")


def examine(data: Path) -> Iterator[Finding]:
    """All findings, one by one."""
    yield Finding("moetta", True, f"{moetta.__version__}, Python {platform.python_version()}")
    for name in PACKAGES:
        try:
            yield Finding(name, True, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            extra = "hf" if name == "transformers" else "bench"
            yield Finding(name, None, f"not installed (pip install 'moetta[{extra}]')")
    yield Finding("CPU", True, f"{torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            yield Finding(f"cuda:{i}", True, torch.cuda.get_device_name(i))
    else:
        yield Finding("CUDA", None, "no GPU; everything runs on the CPU")
    for name in zoo.RECIPES:
        yield _weights(name)
    yield from _data(data)
    yield Finding("cache", None, f"{cache_folder()} (generated or decoded images)")
    yield _self_test()


def _weights(name: str) -> Finding:
    topic = f"weights of {name}"
    if name not in zoo.available():
        return Finding(
            topic, None, f"not found; moetta train-model {name} --help explains how to make them"
        )
    try:
        zoo.load(name)
    except (ValueError, RuntimeError) as error:  # another file, or another network's weights
        return Finding(topic, False, str(error).splitlines()[0])
    return Finding(topic, True, f"sha256 {zoo.card(name)['sha256'][:16]}, as on its card")


def _data(root: Path) -> Iterator[Finding]:
    if not root.is_dir():
        yield Finding("data", None, f"no folder {root}; use --data FOLDER to look elsewhere")
        return
    plain = Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3)
    for name, read in readers(root, plain).items():
        try:
            images = sum(map(len, read()))
            yield Finding(name, True, f"{images:,} images in {root}")
        except (OSError, ValueError) as error:
            yield Finding(name, None, str(error))


def _self_test() -> Finding:
    """Let every method learn from two batches; save and load MoETTA's state."""
    begun = time.monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = VisionTransformer(
            img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=2, num_classes=10
        )
        images = torch.randn(3, 8, 3, 32, 32)
    try:
        methods = [m for m in moetta.list_methods().values() if "BatchNorm" not in m.needs]
        for method in methods:
            name, source = method.name, images[2] if method.needs_source else None
            pixels = method.config().with_pixels((0.5,) * 3, (0.5,) * 3)
            adapter = moetta.adapt(model, pixels, source=source)
            if not all(adapter(batch).isfinite().all() for batch in images[:2]):
                return Finding("self-test", False, f"{name} predicts values that are not finite")
        _check_state(model, images)
    except Exception as error:  # any error is a finding
        return Finding("self-test", False, f"{type(error).__name__}: {error}")
    took = time.monotonic() - begun
    return Finding("self-test", True, f"{len(methods)} methods adapt ({took:.1f} s)")


def _check_state(model: torch.nn.Module, images: Tensor) -> None:
    first, second = (moetta.adapt(model, "moetta") for _ in range(2))
    first(images[0])
    with tempfile.TemporaryDirectory() as folder:
        first.save(Path(folder) / "state.safetensors")
        second.load(Path(folder) / "state.safetensors")
    if not torch.equal(first(images[1]), second(images[1])):
        raise RuntimeError("predictions changed after saving and loading the state")
