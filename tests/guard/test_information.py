from __future__ import annotations

import pytest
import torch
from torch import Tensor

import moetta
from helpers.models import images, small_vit
from moetta.guard.information import Information, information

SIZE = 16


def look(seed: int, spread: float) -> Tensor:
    """Logits of one look; with a spread of zero, all images get the same prediction."""
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(SIZE, 10, generator=generator) + torch.arange(10.0)


def test_information_is_that_of_the_spec() -> None:
    """Three rows (.9, .05, .05) permuted have .704215 nats, identical rows none."""
    rows = torch.tensor([[0.9, 0.05, 0.05], [0.05, 0.9, 0.05], [0.05, 0.05, 0.9]]).log()
    found = information(torch.stack((rows, rows[:1].expand(3, 3))))
    torch.testing.assert_close(found, torch.tensor([0.704215, 0.0]).double(), rtol=0, atol=1e-6)


def test_blank_images_are_found_among_ordinary_ones_and_only_they() -> None:
    kept = Information(SIZE)
    for turn in range(400):
        blank = turn >= 16 and turn // 16 % 2 == 1
        assert kept.add(look(turn, 0.1 if blank else 8.0)) == blank


def test_before_it_is_known_what_is_usual_nothing_is_called_blank() -> None:
    kept = Information(SIZE)
    assert not any(kept.add(look(turn, 8.0 if turn < 5 else 0.0)) for turn in range(8))


def test_traffic_that_stays_becomes_usual() -> None:
    kept = Information(SIZE)
    for turn in range(50):
        kept.add(look(turn, 8.0))
    found = [kept.add(look(turn, 1.0)) for turn in range(600)]
    assert found[0]
    assert sum(found[400:]) < 20  # single looks vary


def test_fewer_images_than_a_look_say_nothing() -> None:
    kept = Information(SIZE)
    for turn in range(20):
        kept.add(look(turn, 8.0))
    before = kept.sums.clone()
    assert not kept.add(look(0, 0.0)[: SIZE - 1])
    assert torch.equal(kept.sums, before)


def blank() -> Tensor:
    """Thirty-two images that nobody could tell apart."""
    return images(1, 99) + 1e-3 * images(32, 98)


@pytest.mark.parametrize("method", ["tent", "moetta", "moetta_plus"])
def test_nothing_is_learnt_from_blank_images(method: str) -> None:
    """Momentum and running means too are as if the blank batch had not come."""
    guard = moetta.Guard(moetta.adapt(small_vit(), method))
    for turn in range(12):
        guard(6 * images(32, turn))
    held = guard.adapter.state_dict()
    logits = guard(blank())
    assert guard.last is not None
    assert guard.last.skipped == "guard: blank images"
    assert logits.shape == (32, logits.shape[1])
    after = guard.adapter.state_dict()
    assert all(torch.equal(after[name], value) for name, value in held.items())
    steps = guard.steps
    guard(6 * images(32, 100))
    assert guard.last.skipped is None
    assert guard.steps == steps + 1
    assert any(not torch.equal(guard.adapter.state_dict()[k], v) for k, v in held.items())


def test_a_guard_that_was_saved_knows_what_is_usual() -> None:
    first, second = (moetta.Guard(moetta.adapt(small_vit(), "tent")) for _ in range(2))
    for turn in range(12):
        first(6 * images(32, turn))
    second.load_state_dict(first.state_dict())
    for guard in (first, second):
        guard(blank())
        assert guard.last is not None
        assert guard.last.skipped == "guard: blank images"
