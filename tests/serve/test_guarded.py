"""The service with the guard around the adapter."""

import base64
import io
import threading
import time

import numpy as np
import torch
from PIL import Image
from starlette.testclient import TestClient

import moetta
from helpers.models import small_vit
from moetta.guard import Guard
from moetta.serve import Settings, create_app
from serve.small_service import ADMIN, LABELS, TOKEN, classifier, picture

PNG = {"Content-Type": "image/png"}


def guarded(lr=1e-3, **settings):
    model = small_vit()

    def build():
        adapter = moetta.adapt(model, "moetta", lr=lr)
        return Guard(adapter, sample=4), adapter

    given = {"max_wait_ms": 1.0, "learn_samples": 4, "admin_token": TOKEN, **settings}
    return create_app(classifier(), build, Settings(allowed_hosts=("testserver",), **given))


def predict(client, seed):
    return client.post("/v1/predict?explain=1", content=picture(seed), headers=PNG)


def batch(client, seed):
    images = [base64.b64encode(picture(seed + i)).decode() for i in range(8)]
    return client.post("/v1/predict?explain=1", json=images)


def source_answer(seed):
    pixels = np.array(Image.open(io.BytesIO(picture(seed))).resize((16, 16)))
    served = classifier()
    with torch.no_grad():
        logits = served.model(served.batch([torch.from_numpy(pixels).permute(2, 0, 1)]))
    return LABELS[int(logits.argmax())]


def test_it_answers_learns_and_explains():
    with TestClient(guarded()) as client:
        for seed in range(0, 80, 8):
            answer = batch(client, seed).json()
            assert len(answer["predictions"]) == 8
            assert all(one["experts"] for one in answer["predictions"])
        stream = client.get("/v1/state").json()["stream"]
        assert stream["guarded"] is True
        assert stream["step"] >= 9


def test_harm_is_taken_back_counted_and_told():
    with TestClient(guarded(lr=1e3)) as client:
        for seed in range(0, 240, 8):
            answer = batch(client, seed)
            assert answer.status_code == 200
        stream = client.get("/v1/state").json()["stream"]
        assert stream["guard_events"]
        assert "because of" in stream["guard_events"][0]["text"]
        text = client.get("/metrics").text
        assert 'moetta_guard_events_total{action="reset"}' in text
        found = predict(client, 500).json()["predictions"][0]
        assert found["labels"][0]["label"] == source_answer(500)


def test_a_restart_continues_guard_and_all(tmp_path):
    with TestClient(guarded(state=tmp_path)) as client:
        for seed in range(0, 40, 8):
            batch(client, seed)
        client.post("/v1/adapt/snapshot", headers=ADMIN)
        before = client.get("/v1/state").json()["stream"]["step"]
        answer = predict(client, 99).json()["predictions"]
    with TestClient(guarded(state=tmp_path)) as client:
        assert client.get("/v1/state").json()["stream"]["step"] == before
        assert predict(client, 99).json()["predictions"] == answer


def test_the_page_is_told_that_the_guard_stopped_learning(caplog):
    with TestClient(guarded(lr=1e3)) as client:
        for seed in range(0, 400, 8):
            batch(client, seed)
            if client.get("/v1/state").json()["stream"]["guard_events"]:
                break
        batch(client, 0)
        predict(client, 0)
        found = client.get("/v1/state").json()
        assert found["adapting"]["reason"].startswith("the guard stopped learning for ")
        end = time.monotonic() + 20
        while 'moetta_batches_total{learning="guard"} 0.0' in client.get("/metrics").text:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert "stream default: reset by its guard" in caplog.text


def test_a_snapshot_by_another_thread_waits_for_a_guarded_step():
    guard = Guard(moetta.adapt(small_vit(), "moetta"), sample=4)
    batch, read = torch.randn(8, 3, 16, 16), []
    guard(batch)
    before = guard.state_dict()
    reader = threading.Thread(target=lambda: read.append(guard.state_dict()))

    def answer(logits):
        reader.start()  # the step is under way
        reader.join(0.02)
        assert reader.is_alive(), "the state was read in the middle of a step"

    guard.on_prediction = answer
    guard(batch)
    reader.join()
    after = guard.state_dict()
    assert all(torch.equal(read[0][name], after[name]) for name in after)
    assert any(not torch.equal(before[name], after[name]) for name in after if name in before)


def test_methods_that_learn_nothing_are_guarded_too():
    model = small_vit()

    def build():
        adapter = moetta.adapt(model, "lame")
        return Guard(adapter, sample=4), adapter

    settings = Settings(allowed_hosts=("testserver",), max_wait_ms=1.0, learn_samples=4)
    with TestClient(create_app(classifier(), build, settings)) as client:
        for seed in range(0, 32, 8):
            batch(client, seed)
        found = client.get("/v1/state").json()
        assert found["stream"]["guarded"] is True
        assert "guard" in found["adapting"]["reason"]
