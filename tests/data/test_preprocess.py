import io

import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torchvision import transforms
from torchvision.models import ResNet50_Weights
from trees import jpeg

from moetta.data import Preprocess, check_preprocess, preprocess_for

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
photo = Image.open(io.BytesIO(jpeg(500, 375)))


def vit(**options):
    return timm.create_model("vit_tiny_patch16_224", **options)


def test_the_default_is_timms_own_evaluation_transform():
    model = vit()
    pre = preprocess_for(model)
    config = timm.data.resolve_model_data_config(model)
    assert (pre.mean, pre.std) == (config["mean"], config["std"]) == ((0.5,) * 3, (0.5,) * 3)
    assert (pre.size, pre.crop_pct, pre.interpolation) == ((224, 224), 0.9, "bicubic")
    theirs = timm.data.create_transform(**config, is_training=False)(photo)
    ours = (pre.transform()(photo).float() / 255 - 0.5) / 0.5
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert preprocess_for("vit_tiny_patch16_224") == pre
    assert pre.source == "timm vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto"])
def test_the_papers_pipeline_is_resize_256_bilinear_crop_224_with_the_models_mean(name):
    pre = preprocess_for(timm.create_model(name), "paper")
    paper = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])
    for picture in (photo, photo.rotate(90, expand=True), photo.resize((100, 130))):
        expected = transforms.functional.pil_to_tensor(paper(picture))
        assert pre.transform()(picture).equal(expected)
    assert pre.mean == ((0.5,) * 3 if name.startswith("vit") else IMAGENET[0])
    assert pre.card()["source"].startswith("paper")


def test_a_normalisation_that_is_not_the_models_is_refused():
    with pytest.raises(
        ValueError, match=r"vit_tiny.*mean \(0.5, 0.5, 0.5\).*\(0.485, 0.456, 0.406\)"
    ):
        preprocess_for(vit(), Preprocess(*IMAGENET))
    with pytest.raises(ValueError, match="std"):
        check_preprocess(vit(), Preprocess((0.5,) * 3, (0.25,) * 3))
    check_preprocess(vit(), Preprocess((0.5,) * 3, (0.5,) * 3))

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = vit()

    with pytest.raises(ValueError, match="mean"):
        preprocess_for(Wrapper(), Preprocess(*IMAGENET))


def test_a_size_that_the_model_cannot_take_is_refused():
    small = vit(img_size=32, patch_size=8)
    assert preprocess_for(small).size == (32, 32)
    with pytest.raises(ValueError, match="takes only images of 32 x 32"):
        preprocess_for(small, "paper")
    assert preprocess_for(timm.create_model("convnext_atto"), "paper").size == (224, 224)


def test_a_model_without_a_config_must_be_told():
    plain = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"Linear does not say what it expects.*Preprocess\("):
        preprocess_for(plain)
    with pytest.raises(ValueError, match="does not say"):
        preprocess_for(plain, "paper")
    with pytest.raises(ValueError, match="needs a model"):
        preprocess_for(None)
    given = Preprocess(*IMAGENET, size=(64, 64))
    assert preprocess_for(plain, given) is given
    assert preprocess_for(None, given) is given


def test_a_timm_config_without_mean_is_not_taken_for_imagenets():
    model = vit()
    model.pretrained_cfg = {"input_size": (3, 224, 224)}
    with pytest.raises(ValueError, match="does not say"):
        preprocess_for(model)


@pytest.mark.parametrize(
    "weights", [ResNet50_Weights.IMAGENET1K_V1, ResNet50_Weights.IMAGENET1K_V2]
)
def test_torchvision_weights(weights):
    pre = preprocess_for(None, weights)
    assert preprocess_for(None, weights.transforms()) == pre
    ours = pre.transform()(photo).float() / 255
    mean, std = (torch.tensor(v)[:, None, None] for v in pre.normalise)
    torch.testing.assert_close((ours - mean) / std, weights.transforms()(photo), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ViTImageProcessor", {}),
        ("DeiTImageProcessor", {}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 224}}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}}),
        ("BitImageProcessor", {"size": {"shortest_edge": 256}}),
    ],
)
def test_hugging_face_processors(name, options):
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, name)(**options)
    pre = preprocess_for(None, processor)
    theirs = processor(photo, return_tensors="pt")["pixel_values"][0]
    mean, std = (torch.tensor(v)[:, None, None] for v in pre.normalise)
    ours = (pre.transform()(photo).float() / 255 - mean) / std
    assert ours.shape == theirs.shape
    # Pillow and torch round resized pixels differently, by a level now and then.
    assert (ours - theirs).abs().mean() < 0.02


def test_a_hugging_face_model_finds_its_processor_beside_its_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    model = transformers.ViTForImageClassification(config)
    with pytest.raises(ValueError, match="does not say"):
        preprocess_for(model)
    model.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path)
    loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path)
    assert preprocess_for(loaded).mean == (0.1, 0.2, 0.3)
    with pytest.raises(ValueError, match="mean"):
        preprocess_for(loaded, Preprocess(*IMAGENET))


@pytest.mark.parametrize("given", ["modell", 3, transforms.CenterCrop(3)])
def test_anything_but_a_preprocessing_is_refused(given):
    with pytest.raises(ValueError, match=r"preprocess"):
        preprocess_for(vit(), given)
    with pytest.raises(ValueError, match="3 numbers"):
        Preprocess((0.5,), (0.5,))
