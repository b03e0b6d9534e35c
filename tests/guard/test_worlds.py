"""The guard in small worlds: hostile traffic, few and many classes, any method."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import moetta
from helpers.models import VIT
from helpers.trials import make

SIZE = 32
# Two more need BatchNorm.
LEARNING = [m for m in moetta.list_methods() if m not in ("noadapt", "norm", "alpha_bn")]


class Net(nn.Module):
    """A nearest-mean classifier with LayerNorms to adapt; no training needed."""

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
        return self.head(self.second(self.turn(self.first(x))))


def world(classes: int, scale: float, noise: float, order: str) -> tuple[Net, Tensor, Tensor]:
    """A source model with 6,400 images of five shifted domains, and their labels."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(classes, SIZE, generator=generator)
    means *= SIZE**0.5 / means.norm(dim=1, keepdim=True)
    labels = torch.randint(classes, (6400,), generator=generator)
    if order == "bursts":
        labels = labels.sort().values
    domains = torch.randint(5, (6400,), generator=generator)
    shift = torch.randn(5, SIZE, generator=generator)[domains]
    stretch = 1 + torch.rand(5, SIZE, generator=generator)[domains]
    images = means[labels] + noise * torch.randn(6400, SIZE, generator=generator)
    return Net(3 * means / SIZE**0.5, scale), stretch * images + shift, labels


def gains(
    net: Net, images: Tensor, labels: Tensor, batch: int = 64, **config: float
) -> tuple[float, float, moetta.Guard]:
    """Points of accuracy above the source model's: Tent's, and guarded Tent's."""
    with torch.no_grad():
        source = (net(images).argmax(1) == labels).double().mean()
    plain = moetta.adapt(net, "tent", **config)
    guard = moetta.Guard(moetta.adapt(net, "tent", **config))
    out = []
    for adapter in (plain, guard):
        parts = zip(images.split(batch), labels.split(batch), strict=True)
        right = torch.cat([adapter(x).argmax(1) == y for x, y in parts])
        out.append(100 * float(right.double().mean() - source))
    return out[0], out[1], guard


@pytest.mark.parametrize("lr", [0.1, 1.0])
@pytest.mark.parametrize(
    ("classes", "scale", "noise"), [(2, 0.5, 3.0), (10, 1.0, 2.0), (100, 1.5, 1.3)]
)
def test_long_bursts_of_one_class(classes: int, scale: float, noise: float, lr: float):
    """The worst label shift: sorted by class. Plain Tent collapses into the present class."""
    plain, guarded, _ = gains(*world(classes, scale, noise, "bursts"), lr=lr)
    assert plain < -5
    assert guarded > -1.5


@pytest.mark.parametrize("batch", [4, 64])
def test_rates_that_destroy_the_model(batch: int):
    net, images, labels = world(10, 1.5, 2.0, "mixed")
    plain, guarded, guard = gains(net, images, labels, batch, lr=0.5)
    assert plain < -20
    assert guarded > -1.5
    assert guard.counts["rollback"] + guard.counts["reset"] >= 1


def test_a_short_stream():
    """Twenty batches: there is no time to wait for an alarm."""
    net, images, labels = world(10, 1.5, 2.0, "mixed")
    plain, guarded, _ = gains(net, images[:1280], labels[:1280], lr=1.0)
    assert plain < -10
    assert guarded > -2.5


def test_a_source_model_that_is_nearly_always_right():
    net, images, labels = world(10, 1.5, 0.8, "mixed")
    with torch.no_grad():
        assert (net(images).argmax(1) == labels).double().mean() > 0.98
    for lr in (0.01, 1.0):
        assert gains(net, images, labels, lr=lr)[1] > -0.5


def test_healthy_learning_is_left_alone():
    """A thousand classes; the gain is kept whole, at a quarter of a forward pass per image."""
    net, images, labels = world(1000, 2.0, 0.9, "mixed")
    plain, guarded, guard = gains(net, images, labels, lr=0.01)
    assert plain > 0
    assert guarded >= 0.95 * plain
    assert not guard.events
    assert guard.totals.forwards < 1.45 * len(images)  # with the probation of 1,024 images


class Other(nn.Module):
    """A model that agrees with nobody."""

    def forward(self, batch: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int(1e4 * batch.sum().abs()) % 1000)
        return 9 * torch.randn(len(batch), VIT.shared()(batch[:1]).shape[1], generator=generator)


@pytest.mark.parametrize("method", LEARNING)
def test_any_method_is_stopped_and_resumes(method: str):
    guard = moetta.Guard(make(method), cooldown=48)
    like = guard.reference._model
    guard.reference._model = Other()  # whatever the method does now looks like harm
    for seed in range(12):
        assert torch.isfinite(guard(VIT.batch(16, seed)[0])).all()
    assert guard.counts["rollback"] + guard.counts["reset"] >= 1
    guard.reference._model = like
    before = guard.counts["resume"]
    for seed in range(40):
        assert torch.isfinite(guard(VIT.batch(16, 100 + seed)[0])).all()
        if guard.counts["resume"] > before:
            return
    raise AssertionError(f"{method} is held for ever: {guard.events}")
