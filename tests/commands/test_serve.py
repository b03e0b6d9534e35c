"""The names of the classes of a served model."""

from __future__ import annotations

import pytest

from moetta.commands.serve import default_labels


@pytest.mark.parametrize(
    ("model", "classes", "first", "last"),
    [
        ("digits-vit", 100, "00", "99"),
        ("cifar-convnext", 10, "airplane", "truck"),
        ("vit_tiny_patch16_224", 1000, "tench, Tinca tinca", "toilet tissue"),
        ("my_models:vit", 3, "0", "2"),
        ("cifar-vit", 4, "0", "3"),  # not the model's own head
    ],
)
def test_classes_have_names_where_the_model_is_known(
    model: str, classes: int, first: str, last: str
) -> None:
    labels = default_labels(model, classes)
    assert len(labels) == classes
    assert labels[0].startswith(first)
    assert labels[-1].startswith(last)
