"""What the recipes build."""

import pytest
import torch

from moetta.zoo.recipes import RECIPES, recipe


def test_recipes_are_found_by_name():
    assert recipe("digits-vit").name == "digits-vit"
    with pytest.raises(ValueError, match="did you mean 'digits-vit'"):
        recipe("digit-vit")


@pytest.mark.parametrize("name", RECIPES)
def test_every_shape_classifies_its_images(name):
    made_by = RECIPES[name]
    model = made_by.shape.build(made_by.classes).eval()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, made_by.classes)
