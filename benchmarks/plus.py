r"""MoETTA+ on validation streams of CIFAR-10, by quarter: what its options are worth.

Each ``--set`` is one run with these fields; without any, the defaults.

- validation: the four extra corruptions at severity 5, 40,000 images.
- hard: the same and eight domains that are far from what the model knows (contrast at 15 and 8 %,
  negatives, a quarter turn, four shades, a dark gamma, exchanged channels, shuffled tiles), 120,000
  images. A method that trusts its own confidence too much falls here.

    python benchmarks/plus.py --data FOLDER_WITH_CIFAR10 --stream hard --model cifar-convnext \
        --limit 20000 --set "" "lr=0.09" "stride=0,radius=0"
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor

import moetta
from guard_streams import normalised
from moetta import zoo
from moetta.data import cifar10, corrupted
from moetta.data.corruptions import EXTRA


@dataclass(frozen=True)
class Options:
    """What is run."""

    data: Path
    """The folder of CIFAR-10."""
    model: str = "cifar-convnext"
    stream: Literal["validation", "hard"] = "hard"
    limit: int = 20_000
    seed: int = 0
    set: tuple[str, ...] = ("",)
    threads: int = 1


def hard(images: Tensor) -> Iterator[Tensor]:
    """Domains that none of the named streams has; uint8 [N, 3, 32, 32] to the same."""
    x = images.float() / 255
    grey = x.mean((1, 2, 3), keepdim=True)
    tiles = x.unfold(2, 8, 8).unfold(3, 8, 8)[:, :, [2, 0, 3, 1]][:, :, :, [1, 3, 0, 2]]
    for made in (
        0.5 + 0.15 * (x - 0.5),
        0.5 + 0.08 * (x - grey),
        1 - x,
        x.rot90(1, (2, 3)),
        (x * 3).round() / 3,
        x**3,
        x[:, [2, 0, 1]],
        tiles.permute(0, 1, 2, 4, 3, 5).reshape(x.shape),
    ):
        yield (made.clamp(0, 1) * 255).round().to(torch.uint8)


def images(options: Options) -> tuple[Tensor, Tensor]:
    """The stream, shuffled: uint8 images and labels."""
    clean = cifar10(options.data, "test")
    rows = torch.arange(len(clean)).split(1000)
    domains = [torch.cat([d.read(r)[0] for r in rows]) for d in corrupted(clean, EXTRA)]
    if options.stream == "hard":
        domains += hard(torch.cat([clean.read(r)[0] for r in rows]))
    labels = clean.labels.repeat(len(domains))
    generator = torch.Generator().manual_seed(options.seed)
    chosen = torch.randperm(len(labels), generator=generator)[: options.limit]
    return torch.cat(domains)[chosen], labels[chosen]


def right(options: Options, stream: tuple[Tensor, Tensor], method: str, **fields: Any) -> Tensor:
    """Which answers are right, 0 or 100."""
    adapter = moetta.adapt(zoo.load(options.model), method, **fields)
    batches = zip(stream[0].split(64), stream[1].split(64), strict=True)
    found = [adapter(normalised(x, options.model)).argmax(1) == y for x, y in batches]
    return 100 * torch.cat(found).double()


def main(options: Options) -> None:
    """Print one line per run."""
    torch.set_num_threads(options.threads)
    stream = images(options)
    none = right(options, stream, "noadapt")
    print(f"{options.model}, {options.stream}, {len(none):,} images: noadapt {none.mean():.2f} %")
    for text in options.set:
        pairs = [part.split("=") for part in text.split(",") if part]
        gain = right(options, stream, "moetta_plus", **{k: json.loads(v) for k, v in pairs}) - none
        quarters = ", ".join(f"{q.mean():.1f}" for q in gain.tensor_split(4))
        print(f"{text or 'defaults'}: {gain.mean():+.2f} ({quarters})", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
