"""What the shapes build."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from moetta.zoo.networks import ConvNeXtShape, ResNetShape, ViTShape


@pytest.mark.parametrize("convs", [1, 2])
@pytest.mark.parametrize(
    "shape",
    [
        ViTShape(dim=24, depth=1, patch=8, stem_widths=(8, 16, 24)),
        ConvNeXtShape(dims=(24, 24, 24, 24), depths=(1, 0, 0, 0), stem_widths=(8, 16, 24)),
    ],
    ids=lambda shape: type(shape).__name__,
)
def test_a_stem_halves_the_image_once_for_each_width(shape, convs):
    model = replace(shape, stem_convs=convs).build(10)
    stem = model.patch_embed if isinstance(shape, ViTShape) else model.stem
    found = [m for m in stem.modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in found] == [w for w in (8, 16, 24) for _ in range(convs)]
    assert [m.stride[0] for m in found] == [2, 1][:convs] * 3
    tokens = stem(torch.zeros(1, 3, 32, 32))
    assert tokens.numel() == 24 * 4 * 4
    with pytest.raises(ValueError, match="24"):
        replace(shape, stem_widths=(8, 16, 20)).build(10)


def test_a_resnet_halves_the_image_in_its_stem_and_before_each_later_stage():
    model = ResNetShape(dims=(8, 16, 24, 32)).build(10)
    x = model.maxpool(model.act1(model.bn1(model.conv1(torch.zeros(1, 3, 32, 32)))))
    sizes = []
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        x = stage(x)
        sizes.append((x.shape[1], x.shape[2]))
    assert sizes == [(8, 16), (16, 8), (24, 4), (32, 2)]
    assert any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
