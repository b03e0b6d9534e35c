"""MoETTA under gradient checkpointing, after failures, and in models of unusual layout."""

import contextlib

import pytest
import torch
from torch import nn

import moetta
from helpers.models import CLASSES, images, small_vit

ABLATIONS = [
    {},
    {"select": False},
    {"reweight": False},
    {"balance": 0.0},
    {"router_grad": False},
    {"routing": "batch"},
    {"moe": False},
    {"router_scope": "model"},
    {"router_scope": "model", "routing": "batch", "top_k": 2},
    {"moe": False, "routing": "batch"},
]


@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_gradient_checkpointing_changes_no_ablation(options):
    checkpointed = small_vit()
    checkpointed.set_grad_checkpointing(True)
    on, off = (moetta.adapt(m, "moetta", lr=0.05, **options) for m in (checkpointed, small_vit()))
    for t in range(3):
        x = images(seed=t)
        torch.testing.assert_close(on(x), off(x))
        assert all(torch.equal(r, off.last.routing[n]) for n, r in on.last.routing.items())
    for key, value in off.state_dict().items():
        torch.testing.assert_close(on.state_dict()[key], value, rtol=1e-4, atol=1e-6)
    with on.paused():
        torch.testing.assert_close(on.merge()(x), on(x))


def fails(*_):
    raise RuntimeError("out of luck")


def test_merging_works_whatever_ran_before():
    adapter = moetta.adapt(small_vit(), "moetta", router_scope="model")
    handle = adapter.network.head.register_forward_pre_hook(fails)
    with pytest.raises(ValueError, match="out of luck"):
        adapter(images())
    handle.remove()
    adapter.merge()
    adapter.network(images())  # past the adapter, with a graph
    merged = adapter.merge()
    with adapter.paused():
        torch.testing.assert_close(merged(images()), adapter(images()))


class Folded(nn.Module):
    """Tokens in windows: one norm layer sees each sample as two rows."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, CLASSES)
        self.first, self.inner, self.last = (nn.LayerNorm(8) for _ in range(3))

    def forward(self, x):
        tokens = self.first(self.stem(x).flatten(2).transpose(1, 2))
        windows = self.inner(tokens.reshape(-1, 2, 8) ** 2)
        return self.head(self.last(windows.reshape(tokens.shape)).mean(1))


def test_a_layer_of_windows_reports_each_samples_experts():
    adapter = moetta.adapt(Folded(), "moetta", lr=0.05)
    for paused in (False, True):
        with adapter.paused() if paused else contextlib.nullcontext():
            adapter(images(6))
        assert {n: r.shape for n, r in adapter.last.routing.items()} == {
            "inner": (6, 2),
            "last": (6, 1),
        }
    one = moetta.adapt(Folded(), "moetta", router_scope="model")
    with pytest.raises(ValueError, match=r"6 rows cannot follow .* 12; use router_scope=\"layer\""):
        one(images(6))


class SequenceFirst(nn.Module):
    """Tokens as [T, B, D], as torch's encoder has them unless told otherwise."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, CLASSES)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16)

    def forward(self, x):
        return self.head(self.encoder(self.stem(x).flatten(2).permute(2, 0, 1)).mean(0))


def test_rows_that_are_no_samples_are_refused_before_any_step():
    adapter = moetta.adapt(SequenceFirst(), "moetta", lr=0.05)
    before = adapter.state_dict()
    for paused in (False, True):
        message = r"'encoder.norm2' got 4 rows for 3 samples.*batch_first=True"
        pause = adapter.paused() if paused else contextlib.nullcontext()
        with pause, pytest.raises(ValueError, match=message):
            adapter(images(3))
    after = adapter.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    whole = moetta.adapt(SequenceFirst(), "moetta", routing="batch")  # nothing to tell apart
    assert whole(images(3)).shape == (3, CLASSES)
