"""Models by every kind of name."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from tiny_models import vit

from moetta.zoo.by_name import forget_models, load_model


@pytest.fixture(autouse=True)
def _fresh() -> None:
    forget_models()


def test_own_function() -> None:
    model = load_model("tiny_models:vit")
    assert not model.training
    expected = vit().state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_weights_from_a_file(tmp_path: Path) -> None:
    other = timm.create_model("test_vit", num_classes=1000)
    save_file(other.state_dict(), tmp_path / "w.safetensors")
    model = load_model("test_vit.r160_in1k", str(tmp_path / "w.safetensors"))
    assert torch.equal(model.head.weight, other.head.weight)  # type: ignore[union-attr, arg-type]
    with pytest.raises(ValueError, match="does not fit"):
        load_model("test_convnext", str(tmp_path / "w.safetensors"))
    with pytest.raises(FileNotFoundError, match="no file"):
        load_model("test_vit", str(tmp_path / "none.safetensors"))


def test_hugging_face_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        image_size=32, patch_size=16, num_labels=5,
    )  # fmt: skip
    saved = transformers.ViTForImageClassification(config)
    saved.save_pretrained(tmp_path / "m")
    model = load_model(str(tmp_path / "m"))
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x).logits, saved.eval()(x).logits)
    with pytest.raises(ValueError, match=r"no config.json"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digits-vitt", "did you mean 'digits-vit'"),
        ("vit_base_patch16_224.augreg3_in21k_ft_in1k", "augreg2_in21k_ft_in1k"),
        ("tiny_models:vitt", "did you mean 'vit'"),
        ("tiny_modelz:vit", "No module named 'tiny_modelz'"),
        ("tiny_models:no_model", "not a torch.nn.Module"),
    ],
)
def test_wrong_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(name)
