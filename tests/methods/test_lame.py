from __future__ import annotations

import pytest
import torch
from torch import nn

import moetta
from helpers.models import images, small_vit
from moetta.methods.lame import (
    ALONE,
    LAMEConfig,
    SmoothingHead,
    knn_affinity,
    rbf_affinity,
    smoothed,
)

P = torch.tensor([[0.9, 0.1], [0.45, 0.55]])
LINKED = torch.tensor([[0.0, 1.0], [1.0, 0.0]])


def test_the_first_iterate_and_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = smoothed(P, LINKED)
    assert limit[:, 0].tolist() == pytest.approx([0.924899, 0.656814], abs=1e-5)
    monkeypatch.setattr("moetta.methods.lame.ITERATIONS", 1)
    assert smoothed(P, LINKED)[:, 0].tolist() == pytest.approx([0.890633, 0.645503], abs=1e-5)


def plain_answers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The source model's probabilities, and its last features at unit length."""
    plain = small_vit().eval()
    heard = []
    assert isinstance(plain.head, nn.Linear)
    plain.head.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    with torch.no_grad():
        p = plain(x).softmax(1).double()
    features = heard[0].double()
    return p, features / features.norm(dim=1, keepdim=True)


def test_the_answers_agree_with_a_plain_computation() -> None:
    x = images(9, 3)
    p, unit = plain_answers(x)
    distance = (unit[:, None] - unit[None]).norm(dim=2)
    sigma = distance.sort(1).values[:, 4].mean()
    w = torch.exp(-(distance**2) / (2 * sigma**2))
    y = p
    for _ in range(100):
        y = (torch.log(p + 1e-10) + w @ y).softmax(1)
    adapter = moetta.adapt(small_vit(), "lame")
    answer = adapter(x)
    torch.testing.assert_close(answer.exp().double(), y, rtol=1e-3, atol=1e-4)
    assert adapter.last is not None
    assert (adapter.last.forwards, adapter.last.backwards) == (9, 0)
    assert set(adapter.state_dict()) == {"counters"}  # nothing is kept between batches


def test_copies_and_a_single_image_have_no_width_to_divide_by() -> None:
    one = torch.ones(1, 3)
    assert rbf_affinity(one, 5) is None
    assert rbf_affinity(one.expand(3, 3), 5) is None
    assert knn_affinity(one, 5) is None
    source = small_vit().eval()
    for batch in (images(1, 0), images(1, 0).expand(4, -1, -1, -1)):
        adapter = moetta.adapt(small_vit(), "lame")
        answer = adapter(batch)
        with torch.no_grad():
            torch.testing.assert_close(answer, source(batch).log_softmax(1))
        assert adapter.last is not None
        assert adapter.last.skipped == ALONE
        adapter(images(4, 0))
        assert adapter.last.skipped is None


@pytest.mark.parametrize("affinity", ["rbf", "knn"])
def test_one_sample_that_is_not_finite_does_not_spoil_the_others(affinity: str) -> None:
    head = SmoothingHead(nn.Linear(3, 4), LAMEConfig(affinity=affinity))  # type: ignore[arg-type]
    features = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    spoilt = torch.cat((features, torch.full((1, 3), float("nan"))))
    with torch.no_grad():
        torch.testing.assert_close(head(spoilt)[:6], head(features))
        head(spoilt[6:])
    assert head.skipped == "non-finite features"


def test_the_stopping_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third iterate on, at a relative change of the energy of 1e-8."""
    p = torch.tensor([[0.9, 0.1], [0.45, 0.55], [0.3, 0.7]], dtype=torch.float64)
    w = torch.tensor([[1.0, 0.6, 0.1], [0.6, 1.0, 0.4], [0.1, 0.4, 1.0]], dtype=torch.float64)
    y, energies = p, list[float]()
    for _ in range(100):
        y = ((p + 1e-10).log() + w @ y).softmax(1)
        parts = -y * (p + 1e-10).log() - y * (w @ y) + y * (y + 1e-20).log()
        energies.append(float(parts.sum()))
        if len(energies) > 2 and abs(energies[-1] - energies[-2]) <= 1e-8 * abs(energies[-2]):
            break
    assert 3 < len(energies) < 100
    assert torch.equal(smoothed(p, w), y)
    monkeypatch.setattr("moetta.methods.lame.ITERATIONS", len(energies) - 1)
    assert not torch.equal(smoothed(p, w), y)
    monkeypatch.setattr("moetta.methods.lame.TOLERANCE", float("inf"))  # at the first chance
    third = p
    for _ in range(3):
        third = ((p + 1e-10).log() + w @ third).softmax(1)
    assert torch.equal(smoothed(p, w), third)


def test_near_neighbours_are_linked_both_ways() -> None:
    angles = torch.tensor([0.0, 0.1, 0.25, 3.0])
    points = torch.stack((angles.cos(), angles.sin()), 1)
    # Each looks at its nearest other; a link that is not returned counts half.
    expected = [[0, 1, 0, 0], [1, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0]]
    torch.testing.assert_close(knn_affinity(points, 1), torch.tensor(expected))


def test_the_answers_of_near_neighbours_agree_with_a_plain_computation() -> None:
    x = images(9, 3)
    p, unit = plain_answers(x)
    w = torch.zeros(9, 9).double()
    for i in range(9):
        near = sorted(range(9), key=lambda j: float((unit[i] - unit[j]).norm()))
        for j in [j for j in near if j != i][:5]:
            w[i, j] += 0.5
            w[j, i] += 0.5
    y = p
    for _ in range(100):
        y = (torch.log(p + 1e-10) + w @ y).softmax(1)
    answer = moetta.adapt(small_vit(), "lame", affinity="knn")(x)
    torch.testing.assert_close(answer.exp().double(), y, rtol=1e-3, atol=1e-4)
