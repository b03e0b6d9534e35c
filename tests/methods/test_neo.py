from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import moetta
from helpers.models import images, small_vit
from moetta.methods.neo import RecentredHead


def features_and_head(model: nn.Module) -> tuple[list[Tensor], nn.Linear]:
    """What the classifier is given, by a hook of the test's own."""
    heard: list[Tensor] = []
    head = model.head
    assert isinstance(head, nn.Linear)
    head.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0].detach()))
    return heard, head


def test_the_mean_grows_as_in_the_definition() -> None:
    head = RecentredHead(nn.Linear(2, 2), None)
    head.learning = True
    head(torch.tensor([[1.0, 3.0], [3.0, 1.0]]))
    torch.testing.assert_close(head.fresh["mean"], torch.tensor([2.0, 2.0]))
    head.mean, head.count = head.fresh["mean"], head.fresh["count"]
    head(torch.tensor([[5.0, 5.0], [5.0, 5.0]]))
    torch.testing.assert_close(head.fresh["mean"], torch.tensor([3.5, 3.5]))


@pytest.mark.parametrize("kind", ["all", "recent"])
def test_several_batches_agree_with_a_plain_computation(kind: str) -> None:
    plain = small_vit().eval()
    heard, head = features_and_head(plain)
    adapter = moetta.adapt(small_vit(), "neo", average=kind)
    total, count, moving = torch.zeros(head.in_features), 0, torch.zeros(head.in_features)
    for seed, size in enumerate((8, 3, 1, 8)):
        x = images(size, seed)
        with torch.no_grad():
            plain(x)
        phi = heard[-1]
        total, count = total + phi.sum(0), count + size
        moving = 0.9 * moving + 0.1 * phi.mean(0)
        mean = total / count if kind == "all" else moving
        expected = (phi - mean) @ head.weight.T + head.bias
        torch.testing.assert_close(adapter(x), expected, rtol=1e-4, atol=1e-5)
        assert adapter.last is not None
        assert (adapter.last.forwards, adapter.last.backwards) == (size, 0)
    state = adapter.state_dict()
    torch.testing.assert_close(state["running.mean"], mean, rtol=1e-4, atol=1e-5)


def test_what_is_not_finite_does_not_count() -> None:
    adapter = moetta.adapt(small_vit(), "neo")
    adapter(images(4, 0))
    before = adapter.state_dict()
    adapter(images(4, 1) * 1e30)  # finite images whose features are not
    assert adapter.last is not None
    assert adapter.last.skipped == "non-finite features"
    after = adapter.state_dict()
    for name in ("running.mean", "running.count"):
        assert torch.equal(before[name], after[name])
    head = RecentredHead(nn.Linear(2, 2), None)
    head.learning = True
    head(torch.tensor([[1.0, 3.0], [float("nan"), 1.0]]))
    torch.testing.assert_close(head.fresh["mean"], torch.tensor([1.0, 3.0]))


def test_a_known_source_mean_leaves_source_images_nearly_alone() -> None:
    source = images(32, 5)
    adapter = moetta.adapt(small_vit(), "neo", source_mean=True, source=source)
    plain = small_vit().eval()
    with torch.no_grad():
        torch.testing.assert_close(adapter(source), plain(source), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="source images"):
        moetta.adapt(small_vit(), "neo", source_mean=True)


def test_pausing_and_merging_use_the_mean_so_far() -> None:
    adapter = moetta.adapt(small_vit(), "neo")
    adapter(images(8, 0))
    before = adapter.state_dict()
    with adapter.paused():
        paused = adapter(images(8, 1))
    assert torch.equal(adapter.state_dict()["running.mean"], before["running.mean"])
    with torch.no_grad():
        assert torch.equal(adapter.merge()(images(8, 1)), paused)


def test_a_model_without_a_linear_classifier_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match="no linear classifier"):
        moetta.adapt(model, "neo")
