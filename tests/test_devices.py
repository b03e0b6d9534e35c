"""Accelerators, where there are any: no method may be tied to the CPU or to CUDA."""

from __future__ import annotations

import pytest
import torch

import moetta
from helpers.models import images, small_vit
from helpers.trials import METHODS, assert_finite, assert_same, eager

DEVICES = [
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA")
    ),
    pytest.param(
        "mps",
        marks=pytest.mark.skipif(not torch.backends.mps.is_available(), reason="there is no MPS"),
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_the_models_device(method: str, device: str, tmp_path) -> None:
    # The source images may stay where they are.
    def build() -> moetta.Adapter:
        model = small_vit().to(device)
        return moetta.adapt(model, method, source=images(8, 101), **eager(method))

    adapter = build()
    on_cpu = moetta.adapt(small_vit(), method, source=images(8, 101), **eager(method))
    x = images(4)
    first = adapter(x.to(device))
    assert first.device.type == device
    if method != "becotta":  # noise is drawn on the device
        torch.testing.assert_close(first.cpu(), on_cpu(x), rtol=1e-3, atol=1e-3)
    adapter(images(4, 1).to(device))
    assert all(p.device.type == device for p in adapter.trained.values())
    state = adapter.state_dict()
    assert_finite(state)
    adapter.save(tmp_path / "state")
    again = build()
    again.load(tmp_path / "state")
    assert_same(again.state_dict(), state)
    adapter.reset()
    adapter(x.to(device))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_cuda_autocast(method: str, dtype: torch.dtype) -> None:
    adapter = moetta.adapt(
        small_vit().cuda(), method, source=images(8, 101).cuda(), **eager(method)
    )
    with torch.autocast("cuda", dtype):
        for seed in range(3):
            assert torch.isfinite(adapter(images(4, seed).cuda())).all()
    assert_finite(adapter.state_dict())
