"""Every method behind the service: it answers and learns, or is refused by name."""

from __future__ import annotations

import base64
import io
import time
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

import moetta
from helpers.models import CLASSES, FAMILIES, small_vit
from moetta.commands.serve import Serve, make_adapter
from moetta.core.adapter import Adapter
from moetta.serve import Classifier, Settings, create_app
from moetta.serve.company import needs_company, with_company
from moetta.serve.tenant import Answering
from serve.small_service import ADMIN, LABELS, TOKEN, picture

MODELS = {"vit": small_vit, "resnet": FAMILIES["timm_resnet"].model}
SIDES = {"vit": 16, "resnet": 32}
REFUSED = {
    "eata": "needs source images",
    "mgtta": "needs source images",
    "norm on a vit": "replaces the statistics of BatchNorm layers",
    "alpha_bn on a vit": "replaces the statistics of BatchNorm layers",
    "rem on a resnet": "needs a ViT",
}
WITHOUT_MEMORY = ("noadapt", "lame", "norm", "alpha_bn")
PNG = {"Content-Type": "image/png"}


def classifier(name: str) -> Classifier:
    side = SIDES[name]

    def prepare(image: Image.Image) -> Any:
        return image.resize((side, side))

    model = MODELS[name]().eval()
    return Classifier("small", model, prepare, (0.5,) * 3, (0.25,) * 3, LABELS[:CLASSES])


def service(name: str, method: str, guard: bool, **settings: Any) -> Any:
    served = classifier(name)
    options = Serve(
        "small", method=method, guard=guard, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)
    )

    def build() -> tuple[Answering, Adapter]:
        return make_adapter(options, served.model)

    given = {"max_wait_ms": 1.0, "learn_samples": 8, "admin_token": TOKEN, **settings}
    return create_app(served, build, Settings(allowed_hosts=("testserver",), **given))


def ask(client: TestClient, seeds: range) -> list[dict[str, Any]]:
    images = [base64.b64encode(picture(seed)).decode() for seed in seeds]
    answer = client.post("/v1/predict?explain=1&top_k=5", json=images)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["predictions"])


def probabilities(prediction: dict[str, Any]) -> np.ndarray[Any, Any]:
    found = sorted((label["class"], label["probability"]) for label in prediction["labels"])
    return np.array([p for _, p in found])


def until(client: TestClient, step: int, images: int) -> dict[str, Any]:
    """The state once so much is done; the answer to a request comes before its accounts."""
    end = time.monotonic() + 20
    while True:
        found: dict[str, Any] = client.get("/v1/state").json()
        stream = found["stream"]
        if (stream["step"], stream["images"]) == (step, images):
            return found
        assert time.monotonic() < end, stream
        time.sleep(0.01)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("method", list(moetta.list_methods()))
def test_it_serves_or_is_refused_by_name(method: str, name: str, guard: bool) -> None:
    if (refusal := REFUSED.get(method, REFUSED.get(f"{method} on a {name}"))) is not None:
        with pytest.raises(ValueError, match=f"{method} {refusal}"):
            service(name, method, guard)
        return
    with TestClient(service(name, method, guard)) as client:
        for begin in range(0, 32, 8):  # batches that are learnt from as a whole
            ask(client, range(begin, begin + 8))
        for seed in range(32, 48):  # and small ones, which are pooled
            ask(client, range(seed, seed + 1))
        watched = guard and method != "noadapt"
        learns = method not in WITHOUT_MEMORY
        found = until(client, step=6 if watched or learns else 0, images=48)
        assert found["stream"]["guarded"] is watched
        if not (learns or watched):
            assert found["adapting"]["reason"] == f"{method} learns nothing"
        assert client.post("/v1/adapt/reset", headers=ADMIN).json()["step"] == 0
        assert 'status="500"' not in client.get("/metrics").text


@pytest.mark.parametrize("method", ["eata", "mgtta"])
def test_a_method_that_needs_source_images_says_how_to_give_them(method: str) -> None:
    with pytest.raises(ValueError, match=f"{method} needs source images.*--source FILE"):
        service("vit", method, guard=True)


def test_methods_without_gradients_learn_too() -> None:
    with TestClient(service("vit", "neo", guard=False)) as client:
        before = probabilities(ask(client, range(100, 101))[0])
        for begin in range(0, 32, 8):
            ask(client, range(begin, begin + 8))
        found = until(client, step=4, images=33)
        assert found["adapting"]["reason"].startswith("learning")
        assert not np.allclose(probabilities(ask(client, range(100, 101))[0]), before, atol=1e-3)


# --- answers that depend on batch-mates ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method", "needed"),
    [
        ("vit", "tent", False),
        ("vit", "moetta", False),
        ("vit", "lame", False),  # alone, there is nothing to smooth
        ("resnet", "noadapt", False),
        ("resnet", "moetta", False),
        ("resnet", "tent", True),
        ("resnet", "norm", True),
    ],
)
def test_whether_company_is_needed_is_found_by_trying(name: str, method: str, needed: bool) -> None:
    served = classifier(name)
    adapter = moetta.adapt(served.model, method)
    like = torch.zeros(1, 3, SIDES[name], SIDES[name])
    assert needs_company(adapter, served.source, like) is needed
    assert adapter.steps == 0


def test_one_image_is_answered_by_the_source_model_and_then_in_company() -> None:
    app = service("resnet", "norm", guard=False)
    served = app.state.service.classifier
    prepared = [served.prepare(image(seed)) for seed in range(12)]
    batch = served.batch([torch.from_numpy(np.array(p)).permute(2, 0, 1) for p in prepared])
    adapter = moetta.adapt(served.model, "norm")
    with TestClient(app) as client:
        answers = [probabilities(ask(client, range(seed, seed + 1))[0]) for seed in range(12)]
    source = served.source(batch).softmax(1).numpy()
    for seed in range(7):  # fewer than eight with itself
        assert np.allclose(answers[seed], source[seed], atol=1e-4)
    for seed in range(7, 12):
        rows = torch.cat([batch[seed : seed + 1], batch[seed - 7 : seed]])
        together = adapter(rows).softmax(1)[0].numpy()
        assert np.allclose(answers[seed], together, atol=1e-4)
        assert not np.allclose(together, source[seed], atol=1e-3)


def test_streams_keep_their_own_company() -> None:
    with TestClient(service("resnet", "norm", guard=False)) as client:
        alone = [probabilities(ask(client, range(seed, seed + 1))[0]) for seed in range(10)]
    with TestClient(service("resnet", "norm", guard=False)) as client:
        among = []
        for seed in range(10):
            among.append(probabilities(ask(client, range(seed, seed + 1))[0]))
            data, headers = picture(500 + seed), {**PNG, "X-Stream-Id": "other"}
            assert client.post("/v1/predict", content=data, headers=headers).status_code == 200
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(alone, among, strict=True))


def test_company_fills_a_batch_up_or_is_not_enough() -> None:
    images, company = torch.zeros(3, 1), torch.arange(4.0)[:, None]
    joined = with_company(images, company, 5)
    assert joined is not None
    assert joined.flatten().tolist() == [0, 0, 0, 2, 3]
    assert with_company(images, company, 8) is None
    assert with_company(images, None, 5) is None
    assert with_company(images, None, 3) is images


def image(seed: int) -> Image.Image:
    return Image.open(io.BytesIO(picture(seed)))
