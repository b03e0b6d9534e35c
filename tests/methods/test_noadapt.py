from __future__ import annotations

import torch

import moetta
from helpers.models import images, small_vit


def test_it_is_the_source_model_for_ever() -> None:
    model = small_vit()
    adapter = moetta.adapt(model, "noadapt")
    for seed in range(3):
        with torch.no_grad():
            expected = model(images(4, seed))
        assert torch.equal(adapter(images(4, seed)), expected)
    assert adapter.state_dict().keys() == {"counters"}
    assert adapter.activated_parameters == 0
    totals = adapter.totals
    assert (totals.forwards, totals.backwards, totals.selected, totals.skipped) == (12, 0, 0, 0)


def test_it_needs_no_norm_layer() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    assert moetta.adapt(model, "noadapt")(torch.zeros(2, 3, 2, 2)).shape == (2, 5)
