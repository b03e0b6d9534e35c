from __future__ import annotations

import pytest
from torch import nn

from helpers.models import FAMILIES, Family
from moetta.nn.blocks import find_blocks


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_blocks_are_found_in_every_family(family: Family):
    blocks = find_blocks(family.shared())
    kinds = {type(b.module).__name__ for b in blocks}
    assert len(kinds) == 1
    assert kinds <= {
        *("Block", "SwinTransformerBlock", "ConvNeXtBlock", "BasicBlock", "EncoderBlock"),
        *("CNBlock", "ViTLayer", "Dinov2Layer", "ConvNextLayer", "BertLayer"),
        "TransformerEncoderLayer",
    }
    assert all(b.width in (8, 16) for b in blocks)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"no repeated blocks.*found 2 Linear, 1 LayerNorm"):
        find_blocks(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)))
