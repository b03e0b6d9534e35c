from __future__ import annotations

import pytest
import torch
from torch import nn

import moetta
from helpers.models import images, small_vit
from moetta.methods.lame import knn_affinity, rbf_affinity, smoothed

P = torch.tensor([[0.9, 0.1], [0.45, 0.55]])
LINKED = torch.tensor([[0.0, 1.0], [1.0, 0.0]])


def test_the_first_iterate_and_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = smoothed(P, LINKED)
    assert limit[:, 0].tolist() == pytest.approx([0.924899, 0.656814], abs=1e-5)
    monkeypatch.setattr("moetta.methods.lame.ITERATIONS", 1)
    assert smoothed(P, LINKED)[:, 0].tolist() == pytest.approx([0.890633, 0.645503], abs=1e-5)


def test_the_answers_agree_with_a_plain_computation() -> None:
    plain = small_vit().eval()
    heard = []
    assert isinstance(plain.head, nn.Linear)
    plain.head.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    x = images(9, 3)
    with torch.no_grad():
        p = plain(x).softmax(1).double()
    unit = heard[0].double() / heard[0].double().norm(dim=1, keepdim=True)
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
    assert rbf_affinity(one, 5).tolist() == [[1.0]]
    assert rbf_affinity(one.expand(3, 3), 5).tolist() == [[1.0] * 3] * 3
    assert knn_affinity(one, 5).tolist() == [[0.0]]
    adapter = moetta.adapt(small_vit(), "lame")
    assert torch.isfinite(adapter(images(1, 0))).all()
    assert torch.isfinite(adapter(images(1, 0).expand(4, -1, -1, -1))).all()


def test_near_neighbours_are_linked_both_ways() -> None:
    angles = torch.tensor([0.0, 0.1, 0.25, 3.0])
    points = torch.stack((angles.cos(), angles.sin()), 1)
    # Each looks at its nearest other; a link that is not returned counts half.
    expected = [[0, 1, 0, 0], [1, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0]]
    torch.testing.assert_close(knn_affinity(points, 1), torch.tensor(expected))
