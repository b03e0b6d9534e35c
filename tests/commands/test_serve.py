"""The served model: the names of its classes, and that it can be learnt through."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moetta.commands.serve import Serve, default_labels, make_parts


class Keeps(nn.Module):
    """Computes something in its first forward pass and keeps it, as models do with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 4)
        self.kept: Tensor | None = None

    def forward(self, images: Tensor) -> Tensor:
        tokens = images.flatten(2).transpose(1, 2)
        if self.kept is None:
            self.kept = torch.linspace(1, 2, tokens.shape[1])[:, None] * 2
        out: Tensor = self.head((self.norm(tokens) * self.kept).mean(1))
        return out


def keeping() -> nn.Module:
    return Keeps().eval()


def test_what_a_model_keeps_from_its_first_image_can_be_learnt_through() -> None:
    half = (0.5, 0.5, 0.5)
    options = Serve(model=f"{__name__}:keeping", method="tent", mean=half, std=half, size=4)
    classifier, build = make_parts(options)
    answering, adapter = build()
    blank = torch.zeros(3, 4, 4, dtype=torch.uint8)
    answering(classifier.batch([blank, blank + 100]))
    assert adapter.totals.steps == 1


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
