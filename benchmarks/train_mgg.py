"""Trains the meta-gradient generator that comes with the package, on the embedded benchmark.

The recipe is that of `moetta.methods.mgtta.pretrain`: 40 epochs over 128 images of the four extra
corruptions. The epoch with the best accuracy on other images of the same corruptions is kept. No
test stream contains these corruptions.

    python benchmarks/train_mgg.py

Writes ``mgg.safetensors`` and, last, its card ``mgg.json``.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

import moetta
from moetta import zoo
from moetta.data import embedded
from moetta.files import write_atomically
from moetta.methods.mgtta import MGG, pretrain

WEIGHTS = Path(moetta.__file__).parent / "methods" / "weights"


@dataclass(frozen=True)
class TrainMGG:
    """What to train, and on what."""

    model: str = "digits-vit"
    samples: int = 128
    """Images to train on, of all four corruptions together."""
    validation: int = 400
    """Images per corruption for choosing the epoch; none of them is trained on."""
    final: int = 1000
    """Images per corruption for the accuracies in the card, used for nothing else."""
    epochs: int = 40
    step_lr: float = 1e-4
    validation_lr: float = 3e-3
    """Three times the recipe's, since these streams are far shorter than the authors'."""
    moments: float = 0.4
    seed: int = 2020
    out: Path = WEIGHTS
    threads: int = 1


def main(options: TrainMGG) -> None:
    """Trains, measures and writes the generator and its card."""
    torch.set_num_threads(options.threads)
    model = zoo.load(options.model)
    clean = embedded.source_images(2000)
    train, choose, test = _parts(options)
    losses: list[float] = []

    def on_epoch(epoch: int, loss: float, accuracy: float | None) -> None:
        losses.append(loss)
        print(f"epoch {epoch + 1:2d}  loss {loss:.4f}  validation accuracy {accuracy:.4f}")

    mgg = pretrain(
        model,
        train,
        source=clean,
        validation=choose,
        epochs=options.epochs,
        step_lr=options.step_lr,
        validation_lr=options.validation_lr,
        samples=options.samples,
        seed=options.seed,
        moments=options.moments,
        on_epoch=on_epoch,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "mgg.safetensors"
    mgg.save(target)
    card = {
        "recipe": {k: v for k, v in asdict(options).items() if k not in ("out", "threads")},
        "source_model": {"name": options.model, "sha256": zoo.card(options.model)["sha256"]},
        "sha256": hashlib.sha256(target.read_bytes()).hexdigest(),
        "loss": {"first_epoch": losses[0], "last_epoch": losses[-1]},
        "accuracy": {
            "noadapt": accuracy(model, "noadapt", test),
            "untrained": _with(model, MGG(options.seed), clean, test),
            "trained": _with(model, mgg, clean, test),
            "protocol": (
                f"mean over the extra corruptions, severity 5, {options.final} images each, "
                "batch 64, reset between corruptions; of mgtta, by lr"
            ),
        },
        "torch": torch.__version__.split("+")[0],
    }
    write_atomically(options.out / "mgg.json", (json.dumps(card, indent=2) + "\n").encode())
    print(json.dumps(card["accuracy"], indent=2))


Part = list[tuple[Tensor, Tensor]]


def _parts(options: TrainMGG) -> tuple[Tensor, Part, Part]:
    """Images to train on, to choose by and to measure on: disjoint, from each corruption."""
    learn: list[Tensor] = []
    choose: Part = []
    test: Part = []
    for domain in embedded.domains("validation"):
        images = torch.stack([domain.images[i] for i in range(len(domain.images))])
        images = (images.float() / 255 - embedded.MEAN[0]) / embedded.STD[0]
        rest = len(images) - options.validation - options.final
        sizes = [rest, options.validation, options.final]
        parts, labels = images.split(sizes), domain.labels.split(sizes)
        learn.append(parts[0])
        choose.append((parts[1], labels[1]))
        test.append((parts[2], labels[2]))
    return torch.cat(learn), choose, test


def accuracy(model: nn.Module, method: str, parts: Part, **settings: object) -> float:
    """The mean accuracy over the parts, adapting to each from the source model."""
    adapter = moetta.adapt(model, method, **settings)  # type: ignore[arg-type]
    shares = []
    for images, labels in parts:
        adapter.reset()
        answers = torch.cat([adapter(x).argmax(-1) for x in images.split(64)])
        shares.append((answers == labels).float().mean().item())
    return round(sum(shares) / len(shares), 4)


def _with(model: nn.Module, mgg: MGG, clean: Tensor, parts: Part) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mgg.safetensors"
        mgg.save(path)
        settings = {"source": clean, "mgg": str(path)}
        return {
            f"{lr:g}": accuracy(model, "mgtta", parts, lr=lr, **settings)
            for lr in (3e-4, 1e-3, 3e-3)
        }


if __name__ == "__main__":
    main(tyro.cli(TrainMGG))
