from __future__ import annotations

import torch

from helpers.models import FAMILIES, images, small_vit
from helpers.vit_features import features
from moetta.nn.features import Features


def test_a_vit_is_heard_behind_the_next_blocks_first_norm():
    small = small_vit(depth=3)
    x, where = images(5), Features(small)
    with where.listening() as outputs:
        small(x)
    expected, _ = features(small, x)
    assert torch.equal(where.join(outputs), expected)
    assert not any(m._forward_hooks for m in small.modules())


def test_places_are_averaged_where_there_is_no_class_token():
    model = FAMILIES["timm_convnext"].model()
    where = Features(model)
    with where.listening() as outputs:
        model(images(2, side=32))
    joined = where.join(outputs)
    first = outputs["stages.1.blocks.0.norm"]  # channels last
    torch.testing.assert_close(joined[:, :8], first.mean((1, 2)))
    torch.testing.assert_close(joined[:, -16:], outputs["head.norm"].mean((2, 3)))
