"""Batches: what is refused before anything is computed, and what the model makes of the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from helpers.models import FAMILIES, VIT, call, images, small_vit
from helpers.trials import METHODS, assert_same, make
from moetta.core.inputs import Inputs


def _spoilt(value: float) -> Tensor:
    batch = images(4)
    batch[2, 1, 3, 5] = value
    return batch


BAD_IMAGES = {
    "empty": (torch.empty(0, 3, 16, 16), "batch is empty"),
    "scalar": (torch.tensor(1.0), "batch is empty"),
    "nan": (_spoilt(float("nan")), r"NaN or infinite values in samples \[2\]"),
    "inf": (_spoilt(float("inf")), r"NaN or infinite values in samples \[2\]"),
    "minus_inf": (_spoilt(float("-inf")), r"NaN or infinite values in samples \[2\]"),
    "both_inf": (torch.full((2, 3, 16, 16), torch.inf), r"in samples \[0, 1\]"),
    "one_channel": (torch.zeros(2, 1, 16, 16), r"rejected a batch of shape \(2, 1, 16, 16\)"),
    "wrong_size": (torch.zeros(2, 3, 24, 24), r"shape \(2, 3, 24, 24\).*image size"),
    "bytes": (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), "torch.uint8; convert and normalise"),
    "no_batch_axis": (torch.zeros(3, 16, 16), r"unsqueeze\(0\)|image batch \[B, C, H, W\]"),
    "flat": (torch.zeros(4, 8), r"rejected a batch of shape \(4, 8\)|image batch"),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_refused_batch_changes_nothing(method: str) -> None:
    adapter = make(method)
    adapter(images(4))
    before, last = adapter.state_dict(), adapter.last
    for batch, message in BAD_IMAGES.values():
        with pytest.raises(ValueError, match=message):
            adapter(batch)
        assert_same(before, adapter.state_dict())
        assert adapter.last is last
    for arguments in ((), ("picture.png",), ([images(2)],)):
        with pytest.raises(ValueError, match=r"called without a tensor.*adapter\(images\)"):
            adapter(*arguments)
    with pytest.raises(ValueError, match="argument names"):
        adapter(pictures=images(2))
    assert_same(before, adapter.state_dict())
    assert_same(adapter(images(4, 1)), _second_step(method))


def _second_step(method: str) -> Tensor:
    adapter = make(method)
    adapter(images(4))
    return adapter(images(4, 1))


def test_text_that_the_model_cannot_read_is_refused() -> None:
    family = FAMILIES["hf_bert"]
    adapter = make("tent", family)
    before = adapter.state_dict()
    ids = torch.full((2, 8), 50)  # the vocabulary ends at 49
    with pytest.raises(ValueError, match="rejected a batch"):
        adapter(input_ids=ids)
    with pytest.raises(ValueError, match="rejected a batch"):
        adapter(attention_mask=torch.ones(2, 8, dtype=torch.long))
    assert_same(before, adapter.state_dict())


@pytest.mark.parametrize("size", [1, 3])
def test_sequences_of_vectors_are_no_single_image(size: int) -> None:
    family = FAMILIES["hf_bert"]
    adapter = make("tent", family)
    embeddings = torch.randn(size, 8, 16)
    expected = call(family.shared(), {"inputs_embeds": embeddings})
    torch.testing.assert_close(adapter(inputs_embeds=embeddings), expected.detach())


def test_large_finite_values_are_not_mistaken_for_infinite_ones() -> None:
    for tensor in (torch.full((2, 3), 3e38), torch.full((4,), 3e38)):
        Inputs.checked((tensor,), {})
        Inputs.checked((torch.zeros(2, 3),), {"scale": tensor.double()[0].sum() * 1e10})
    with pytest.raises(ValueError, match="NaN"):
        Inputs.checked((torch.zeros(2, 3),), {"scale": torch.tensor(float("nan"))})


class Wrapped(nn.Module):
    """A classifier that returns its logits in some packing."""

    def __init__(self, pack) -> None:
        super().__init__()
        self.inner, self.pack = small_vit(), pack

    def forward(self, x: Tensor) -> object:
        return self.pack(self.inner(x))


@pytest.mark.parametrize(
    "pack",
    [
        lambda z: SimpleNamespace(logits=z),
        lambda z: {"logits": z, "loss": None},
        lambda z: (z, None),
        lambda z: [z],
    ],
    ids=["attribute", "dict", "tuple", "list"],
)
def test_logits_are_found_in_any_packing(pack) -> None:
    model = Wrapped(pack).eval()
    expected = model.inner(images(4)).detach()
    torch.testing.assert_close(make("tent", model=model)(images(4)), expected)


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (lambda z: "cat", "returned str"),
        (lambda z: {"scores": z}, "returned dict"),
        (lambda z: z[:, 0], r"logits of shape \(4,\) for 4 samples"),
        (lambda z: z[:, :1], "at least two classes"),
        (lambda z: z[:2], r"logits of shape \(2, 5\) for 4 samples"),
        (lambda z: z[:, :, None], r"shape \(4, 5, 1\)"),
    ],
    ids=["text", "dict", "vector", "one_class", "rows", "map"],
)
def test_outputs_without_logits_are_refused(pack, message: str) -> None:
    adapter = make("tent", model=Wrapped(pack))
    before = adapter.state_dict()
    with pytest.raises(ValueError, match=message):
        adapter(images(4))
    assert_same(before, adapter.state_dict())


def test_select_takes_samples_of_every_per_sample_tensor() -> None:
    x, mask, scale = torch.arange(6.0).view(3, 2), torch.tensor([1, 0, 1]), torch.tensor(2.0)
    chosen = Inputs((x,), {"mask": mask, "scale": scale, "name": "a"}).select(mask.bool())
    assert chosen.args[0].tolist() == [[0, 1], [4, 5]]
    assert chosen.kwargs["mask"].tolist() == [1, 1]
    assert chosen.kwargs["scale"] is scale
    assert chosen.kwargs["name"] == "a"
    assert len(chosen) == 2


def test_with_images_changes_the_pixels_only() -> None:
    x, other = images(2), torch.zeros(2, 4)
    changed = Inputs((), {"pixel_values": x, "other": other}).with_images(x + 1)
    assert_same(changed.kwargs["pixel_values"], x + 1)
    assert changed.kwargs["other"] is other
    assert Inputs((other,), {}).images is None


def test_inputs_are_left_as_they_are() -> None:
    batch = VIT.batch(4)[0]
    before = batch.clone()
    for method in METHODS:
        make(method)(batch)
    assert_same(before, batch)
