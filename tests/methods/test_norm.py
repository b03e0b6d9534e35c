from __future__ import annotations

import pytest
import torch
from torch import nn

import moetta
from helpers.models import images, small_vit


def small_cnn() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 5),
    )  # fmt: skip
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    nn.init.normal_(norm.weight, 1, 0.2)
    nn.init.normal_(norm.bias, 0, 0.2)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return model.eval()


@pytest.mark.parametrize(("method", "share"), [("norm", 0.0), ("alpha_bn", 0.9)])
def test_statistics_are_mixed_as_defined(method: str, share: float) -> None:
    plain, adapter = small_cnn(), moetta.adapt(small_cnn(), method)
    conv, norm, *rest = plain
    for seed in range(2):
        x = images(6, seed)
        with torch.no_grad():
            y = conv(x)
            mean, var = y.mean((0, 2, 3)), y.var((0, 2, 3), correction=0)
            mean = share * norm.running_mean + (1 - share) * mean
            var = share * norm.running_var + (1 - share) * var
            y = (y - mean[:, None, None]) / (var[:, None, None] + norm.eps).sqrt()
            y = y * norm.weight[:, None, None] + norm.bias[:, None, None]
            expected = nn.Sequential(*rest)(y)
        torch.testing.assert_close(adapter(x), expected, rtol=1e-4, atol=1e-5)
        assert adapter.last is not None
        assert (adapter.last.forwards, adapter.last.backwards) == (6, 0)


def test_source_statistics_alone_are_the_source_model() -> None:
    x = images(4, 0)
    with torch.no_grad():
        expected = small_cnn()(x)
    answer = moetta.adapt(small_cnn(), "norm", source_share=1.0)(x)
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["norm", "alpha_bn"])
def test_a_model_without_batchnorm_is_refused_by_name(method: str) -> None:
    with pytest.raises(ValueError, match=f"{method} replaces the statistics of BatchNorm layers"):
        moetta.adapt(small_vit(), method)
