"""A real pre-trained model and real photos, served: right labels, learning, memory.

Set MOETTA_TEST_DATA to a folder with the weights and the photos; it is looked for beside the
repository too.
"""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

from moetta.data.corruptions import corrupt
from moetta.data.labels import imagenet_synsets
from serve.running import Running

MODEL = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
DATA = Path(
    os.environ.get("MOETTA_TEST_DATA") or Path(__file__).parents[3].joinpath("shared", "data")
)
WEIGHTS, PHOTOS = DATA / f"{MODEL}.safetensors", DATA / "imagenet-val-2.tar"

pytestmark = pytest.mark.skipif(
    not (WEIGHTS.is_file() and PHOTOS.is_file()),
    reason="needs ViT-Tiny's weights and ImageNet photos; set MOETTA_TEST_DATA to their folder",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options = ("--model", MODEL, "--weights", str(WEIGHTS), "--learn-samples", "16")
    with Running(
        tmp_path_factory.mktemp("state"), *options, "--queue-timeout", "60", wait=250
    ) as found:
        yield found
        assert found.stop() == 0


def photos(count: int) -> list[tuple[Image.Image, int]]:
    """One photo of each of the first classes in the archive, and its class."""
    classes = {synset: number for number, synset in enumerate(imagenet_synsets())}
    found: dict[int, Image.Image] = {}
    with tarfile.open(PHOTOS) as archive:
        for member in archive:
            if member.isfile() and (number := classes[Path(member.name).parent.name]) not in found:
                file = archive.extractfile(member)
                assert file is not None
                found[number] = Image.open(io.BytesIO(file.read())).convert("RGB")
                if len(found) == count:
                    break
    return [(image, number) for number, image in found.items()]


def jpeg(image: Image.Image, corruption: str, severity: int) -> bytes:
    """A corrupted photo as a file."""
    pixels = pil_to_tensor(image.resize((256, 256)))[None]
    damaged = corrupt(pixels, corruption, severity=severity, index=[0])[0]
    out = io.BytesIO()
    Image.fromarray(damaged.permute(1, 2, 0).numpy()).save(out, "JPEG", quality=95)
    return out.getvalue()


def test_corrupted_photos_get_the_right_labels_and_are_learnt_from(server: Running) -> None:
    torch.set_num_threads(1)
    given = photos(48)
    right, named = 0, set()
    for place, (image, number) in enumerate(given):
        corruption = ("brightness", "gaussian_noise", "jpeg_compression")[place % 3]
        answer = server.predict(jpeg(image, corruption, 1), "image/jpeg", explain=1, top_k=1)
        assert answer.status_code == 200, answer.text
        [found] = answer.json()["predictions"]
        right += found["labels"][0]["class"] == number
        named.add(found["labels"][0]["label"])
        assert len(found["experts"]) == 24  # all LayerNorms but the first
    assert right >= 30
    assert all(name.lower() != name.upper() for name in named)  # words, not numbers
    end = time.monotonic() + 60
    while server.state()["stream"]["step"] < 3:  # 48 images in pools of 16
        assert time.monotonic() < end
        time.sleep(0.2)
    assert server.state()["stream"]["guarded"]
    assert server.metric("moetta_updates_total") == 3


def test_tenants_share_the_network(server: Running) -> None:
    image, number = photos(1)[0]
    body = jpeg(image, "brightness", 1)
    before = server.memory()
    for tenant in range(8):
        answer = server.predict(body, "image/jpeg", headers={"X-Stream-Id": f"t{tenant}"}, top_k=1)
        assert answer.json()["predictions"][0]["labels"][0]["class"] == number
        assert answer.json()["step"] == 0
    # The network is 23 MB; eight copies would be 180 MB.
    assert server.memory() - before < 100e6
