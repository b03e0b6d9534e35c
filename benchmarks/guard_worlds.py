"""The guard in hundreds of small worlds: what no shipped model or stream was looked at for.

A world is a nearest-mean classifier with LayerNorms, and 6,400 images (vectors of 32 numbers) of
five shifted and stretched domains. Nothing is trained or downloaded; a run takes seconds.

    python benchmarks/guard_worlds.py

Worlds differ in the number of classes (2 to 1,000), in the confidence of the source model (from too
little to too much), in the learning rate (three decades) and in the seed. Streams:

- mixed, sudden: domains at random, or one after another.
- bursts: sorted by class.
- return: clean images, shifted ones, clean ones again.
- clean: no shift.
- one-class: nothing but one class.
- noise, constant: every second block of 16 batches is noise, or one value per image.
- poison: half of each batch is the source model's most confident error.
- batch-4: four images at a time.
- short: the first 20 batches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import tyro
from torch import Tensor, nn

import moetta

SIZE = 32
BLOCK = 16  # batches
STREAMS = (
    "mixed", "sudden", "bursts", "return", "clean", "one-class", "noise", "constant", "poison",
    "batch-4", "short",
)  # fmt: skip
# Classes, scale of the logits, noise of the images: unsure, fair and overconfident source models.
SOURCES = (
    (2, 0.3, 3.0), (2, 1.5, 3.0),
    (10, 0.5, 2.0), (10, 1.0, 2.0), (10, 2.0, 2.0),
    (100, 1.0, 1.3), (100, 2.0, 1.3),
    (1000, 2.0, 0.9),
)  # fmt: skip

Batches = list[tuple[Tensor, Tensor]]  # images, labels; label -1 is not scored


@dataclass(frozen=True)
class Options:
    """What is run."""

    streams: tuple[str, ...] = STREAMS
    methods: tuple[str, ...] = ("tent", "eata", "moetta")
    rates: tuple[float, ...] = (0.003, 0.03, 0.3)
    seeds: tuple[int, ...] = (0,)
    threads: int = 1


class Net(nn.Module):
    """A nearest-mean classifier with LayerNorms to adapt."""

    def __init__(self, means: Tensor, scale: float) -> None:
        super().__init__()
        turn, _ = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.manual_seed(1)))
        self.first, self.second = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.turn = nn.Linear(SIZE, SIZE, bias=False)
        self.head = nn.Linear(SIZE, len(means), bias=False)
        with torch.no_grad():
            self.turn.weight.copy_(turn)
            self.head.weight.copy_(scale * means @ turn.T)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.head(self.second(self.turn(self.first(x))))
        return out


@dataclass(frozen=True)
class World:
    """A source model, source images, and a stream in order."""

    net: Net
    source: Tensor
    images: Tensor
    labels: Tensor


def world(classes: int, scale: float, noise: float, stream: str, seed: int = 0) -> World:
    """A source model with 6,400 images of five shifted domains."""
    generator = torch.Generator().manual_seed(seed)
    count = 1280 if stream == "short" else 6400
    means = torch.randn(classes, SIZE, generator=generator)
    means *= SIZE**0.5 / means.norm(dim=1, keepdim=True)
    labels = torch.randint(classes, (count,), generator=generator)
    domains = torch.randint(5, (count,), generator=generator)
    if stream == "bursts":
        labels = labels.sort().values
    if stream == "one-class":
        labels = torch.ones_like(labels)
    if stream == "sudden":
        domains = domains.sort().values
    clean = means[labels] + noise * torch.randn(count, SIZE, generator=generator)
    shift = torch.randn(5, SIZE, generator=generator)[domains]
    stretch = 1 + torch.rand(5, SIZE, generator=generator)[domains]
    images = clean if stream == "clean" else stretch * clean + shift
    if stream == "return":
        third = count // 3
        images[:third], images[-third:] = clean[:third], clean[-third:]
    those = torch.randint(classes, (256,), generator=generator)
    source = means[those] + noise * torch.randn(256, SIZE, generator=generator)
    return World(Net(3 * means / SIZE**0.5, scale), source, images, labels)


def batches(found: World, stream: str) -> Batches:
    """The stream of a world, with what is thrown in."""
    size = {"batch-4": 4, "poison": 32}.get(stream, 64)
    ordinary = zip(found.images.split(size), found.labels.split(size), strict=True)
    if stream == "poison":
        with torch.no_grad():
            confidence, predicted = found.net(found.images[:1000]).softmax(1).max(1)
        wrong = torch.where(predicted != found.labels[:1000], confidence, 0)
        worst = found.images[wrong.argmax()]
        return [
            (torch.cat((x, worst.expand_as(x))), torch.cat((y, torch.full_like(y, -1))))
            for x, y in ordinary
        ]
    if stream in ("noise", "constant"):
        return list(interrupted(ordinary, 1 if stream == "constant" else SIZE))
    return list(ordinary)


def interrupted(
    ordinary: Iterator[tuple[Tensor, Tensor]], numbers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every second block is junk: so many random numbers per image."""
    generator = torch.Generator().manual_seed(5)
    for number, batch in enumerate(ordinary):
        if number % BLOCK == 0 and number:
            for _ in range(BLOCK):
                junk = 2 * torch.randn(64, numbers, generator=generator).expand(64, SIZE)
                # A LayerNorm divides by the spread of each image; it must not be zero.
                junk = junk + 0.01 * torch.randn(64, SIZE, generator=generator)
                yield junk, torch.full((64,), -1)
        yield batch


def gains(
    found: World, stream: str, method: str, lr: float
) -> tuple[float, float, float, moetta.Guard]:
    """The source model's accuracy, what plain and guarded adaptation add to it, and the guard."""
    parts = batches(found, stream)
    source = found.source if method == "eata" else None
    plain = moetta.adapt(found.net, method, source=source, lr=lr)
    guard = moetta.Guard(moetta.adapt(found.net, method, source=source, lr=lr))
    shares = [
        100 * float(torch.cat([(f(x).argmax(1) == y)[y >= 0] for x, y in parts]).double().mean())
        for f in (torch.no_grad()(found.net), plain, guard)
    ]
    return shares[0], shares[1] - shares[0], shares[2] - shares[0], guard


def main(options: Options) -> None:
    """Run all worlds; print one line per stream and method."""
    torch.set_num_threads(options.threads)
    logging.getLogger("moetta").setLevel(logging.ERROR)
    print("| stream | method | runs | plain, worst | guarded, worst | below -0.5 "
          "| plain helps | kept 80 % |")  # fmt: skip
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for stream in options.streams:
        for method in options.methods:
            rows = [
                gains(world(*source, stream, seed), stream, method, lr)[1:3]
                for source in SOURCES
                for lr in options.rates
                for seed in options.seeds
            ]
            below = sum(guarded < -0.5 for _, guarded in rows)
            # A gain of a tenth of a point is six images.
            helped = [(plain, guarded) for plain, guarded in rows if plain > 0.1]
            kept = sum(guarded >= 0.8 * plain for plain, guarded in helped)
            print(
                f"| {stream} | {method} | {len(rows)} | {min(p for p, _ in rows):.2f} "
                f"| {min(g for _, g in rows):.2f} | {below} | {len(helped)} | {kept} |",
                flush=True,
            )


if __name__ == "__main__":
    main(tyro.cli(Options))
