"""The routes, in one process with a tiny model."""

import base64
import threading
import time

import pytest
from starlette.testclient import TestClient

from moetta.serve.engine import GIVE_WAY
from serve.small_service import ADMIN, LABELS, TOKEN, app, picture

PNG = {"Content-Type": "image/png"}


@pytest.fixture
def client(tmp_path):
    with TestClient(app(state=tmp_path)) as found:
        yield found


def predict(client, data=None, **options):
    headers = {**PNG, **options.pop("headers", {})}
    return client.post(
        "/v1/predict", content=picture() if data is None else data, headers=headers, params=options
    )


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def counted(client, *lines):
    """Wait until the metrics hold these lines: the engine counts after it has answered."""
    until(lambda: all(line in client.get("/metrics").text for line in lines))


def state(client, **headers):
    return client.get("/v1/state", headers=headers).json()["stream"]


# --- predicting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_an_image_gets_labels_with_probabilities(client, kind):
    headers = {"Content-Type": f"image/{kind.lower()}", "X-Request-Id": "mine-1"}
    answer = predict(client, picture(kind=kind), top_k=5, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "mine-1"
    found = answer.json()
    assert found["request_id"] == "mine-1"
    assert (found["stream"], found["step"]) == ("default", 0)
    (one,) = found["predictions"]
    assert {entry["label"] for entry in one["labels"]} == set(LABELS)
    shares = [entry["probability"] for entry in one["labels"]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert all(LABELS[entry["class"]] == entry["label"] for entry in one["labels"])
    assert "experts" not in one


def test_top_k_and_a_foreign_request_id(client):
    answer = predict(client, top_k=2, headers={"X-Request-Id": "no good\x7f"})
    assert len(answer.json()["predictions"][0]["labels"]) == 2
    assert len(answer.json()["request_id"]) == 32
    assert len(predict(client, top_k=1000).json()["predictions"][0]["labels"]) == len(LABELS)


def test_explain_gives_experts_and_entropy(tmp_path):
    with TestClient(app("moetta")) as client:
        (one,) = predict(client, explain=1).json()["predictions"]
    assert 0 < one["entropy"] < 1.7
    assert one["entropy_share"] == pytest.approx(one["entropy"] / 1.6094, rel=1e-3)
    assert one["experts"]
    assert all(len(chosen) == 1 and 0 <= chosen[0] < 9 for chosen in one["experts"].values())


def test_the_answer_is_the_models_own(client):
    import moetta
    from serve.small_service import classifier, prepare

    served = classifier()
    import io

    import numpy as np
    import torch
    from PIL import Image

    pixels = np.array(prepare(Image.open(io.BytesIO(picture(3)))))
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    logits = moetta.adapt(served.model, "noadapt")(served.batch([image]))
    expected = logits.softmax(1)[0]
    labels = predict(client, picture(3)).json()["predictions"][0]["labels"]
    for entry in labels:
        assert entry["probability"] == pytest.approx(float(expected[entry["class"]]), abs=1e-5)


def test_one_bad_image_of_several_fails_alone(client):
    good = base64.b64encode(picture(1)).decode()
    answer = client.post("/v1/predict", json=[good, "bm90IGFuIGltYWdl", good, "!"])
    assert answer.status_code == 200
    one, two, three, four = answer.json()["predictions"]
    assert one["labels"] == three["labels"]
    assert (two["status"], four["status"]) == (415, 422)
    files = [("image", ("a.png", picture(1))), ("image", ("b.png", b"no"))]
    one_again, bad = client.post("/v1/predict", files=files).json()["predictions"]
    assert one_again["labels"][0]["label"] == one["labels"][0]["label"]
    assert bad["status"] == 415


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"", "image/png", 422),
        (b"nothing", "image/png", 415),
        (picture()[:50], "image/png", 422),
        (b"x", "text/plain", 415),
        (b"[]", "application/json", 422),
        (b"x" * 2_000_000, "image/png", 413),
        (picture(side=600), "image/png", 413),
    ],
)
def test_bad_bodies_are_refused_with_a_reason(tmp_path, body, kind, status):
    with TestClient(app(max_body=1_500_000, max_pixels=300_000)) as client:
        answer = client.post("/v1/predict", content=body, headers={"Content-Type": kind})
        assert answer.status_code == status
        assert len(answer.json()["error"]) > 10
        assert predict(client).status_code == 200


def test_a_body_without_a_length_is_bounded_too(tmp_path):
    sent = []

    def endless():
        while len(sent) < 1000:
            sent.append(1)
            yield b"x" * 10_000

    with TestClient(app(max_body=100_000)) as client:
        answer = client.post("/v1/predict", content=endless(), headers=PNG)
    assert answer.status_code == 413


@pytest.mark.parametrize("query", ["top_k=0", "top_k=x", "explain=maybe", "top_k=99999"])
def test_bad_parameters_are_refused(client, query):
    answer = client.post(f"/v1/predict?{query}", content=picture(), headers=PNG)
    assert answer.status_code == 422
    assert query.split("=")[0] in answer.json()["error"]


def test_a_large_image_is_decoded_too(client):
    assert predict(client, picture(side=700)).status_code == 200


def test_unknown_paths_and_methods(client):
    assert client.get("/nothing").status_code == 404
    assert client.get("/v1/predict").status_code == 405
    assert "error" in client.get("/nothing").json()


# --- learning -----------------------------------------------------------------------------------


def test_small_batches_are_pooled_into_one_update(client):
    for seed in range(3):
        assert predict(client, picture(seed)).json()["step"] == 0
    until(lambda: state(client)["pool"] == {"images": 3, "needed": 4})
    predict(client, picture(3))
    until(lambda: state(client)["step"] == 1)
    assert state(client)["pool"]["images"] == 0
    assert predict(client).json()["step"] == 1


def test_a_large_batch_is_answered_before_it_is_learnt_from(client, monkeypatch):
    images = [base64.b64encode(picture(seed)).decode() for seed in range(6)]
    adapter = client.app.state.service.tenants.peek("default").adapter
    learning, go_on, step_along = threading.Event(), threading.Event(), adapter.step_along

    def slow(grads):
        learning.set()
        go_on.wait(20)
        step_along(grads)

    monkeypatch.setattr(adapter, "step_along", slow)
    assert client.post("/v1/predict", json=images).json()["step"] == 0  # answered ...
    assert learning.wait(5)
    assert state(client)["step"] == 0  # ... while the update has not happened,
    assert client.get("/healthz").status_code == 200  # and everything else goes on
    go_on.set()
    until(lambda: state(client)["step"] == 1)


def test_an_answer_is_sent_before_the_accounts_are_done(client, monkeypatch):
    service, seen = client.app.state.service, []

    def way() -> None:
        seen.append((dict(service.engine.recent), service.watch._batches))

    monkeypatch.setattr(service.engine, "_give_way", way)
    assert predict(client).status_code == 200
    until(lambda: seen)  # the answer may arrive before the engine gives way
    assert seen == [({}, 0)]


def test_the_engine_gives_way_only_while_nobody_waits(client, monkeypatch):
    engine, slept = client.app.state.service.engine, []
    monkeypatch.setattr("moetta.serve.engine.time.sleep", slept.append)
    monkeypatch.setattr(engine.queue, "size", 1)
    engine._give_way()
    assert slept == []
    monkeypatch.setattr(engine.queue, "size", 0)
    engine._give_way()
    assert slept == [GIVE_WAY]


def test_under_pressure_learning_gives_way(tmp_path):
    images = [base64.b64encode(picture(seed)).decode() for seed in range(16)]
    settings = {"max_batch": 4, "learn_queue": 4, "max_queue": 64}
    with TestClient(app(**settings)) as client:
        assert client.post("/v1/predict", json=images).status_code == 200
        # Of four batches, only the last had no more than four images waiting, its own.
        learnt, pressed = 'learning="learnt"} 1.0', 'learning="pressure"} 3.0'
        counted(client, f"moetta_batches_total{{{learnt}", f"moetta_batches_total{{{pressed}")


def test_updates_that_take_too_long_give_way(client):
    engine = client.app.state.service.engine
    learn(client)
    engine.update_seconds = 10.0
    for seed in range(4):
        predict(client, picture(seed))
    counted(client, 'learning="pressure"} 1.0')
    found = client.get("/v1/state").json()
    assert found["adapting"]["reason"].startswith("not learning: an update takes 40.0 s")
    assert (found["stream"]["step"], found["stream"]["pool"]["images"]) == (1, 0)
    engine.update_seconds = 0.63  # 2.52 s is too long, but soon forgotten
    for seed in range(4):
        predict(client, picture(seed))
    counted(client, 'learning="pressure"} 2.0')
    learn(client)


def test_noadapt_never_learns(tmp_path):
    with TestClient(app("noadapt")) as client:
        for seed in range(6):
            assert predict(client, picture(seed)).json()["step"] == 0
        found = client.get("/v1/state").json()
        assert found["adapting"]["reason"] == "noadapt learns nothing"
        counted(client, 'learning="fixed"} 6.0')


def test_streams_learn_apart(client):
    for seed in range(4):
        predict(client, picture(seed), headers={"X-Stream-Id": "one"})
    until(lambda: state(client, **{"X-Stream-Id": "one"})["step"] == 1)
    assert predict(client, headers={"X-Stream-Id": "two"}).json()["step"] == 0
    assert state(client)["step"] == 0
    answer = predict(client, headers={"X-Stream-Id": "../etc"})
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("X-Stream-Id must be 1 to 64 letters")
    assert state(client, **{"X-Stream-Id": "three"}) == {"name": "three", "in_memory": False}


def test_each_stream_has_its_own_history_and_reasons(client):
    stream = {"X-Stream-Id": "one"}
    for _ in range(4):
        predict(client, picture(1), headers=stream)  # the same image: one class
    for seed in range(20):
        predict(client, picture(seed))
    client.post("/v1/adapt/pause", headers={**ADMIN, **stream})
    until(lambda: client.get("/v1/state", params={"since": 0}).json()["rows"])

    def last(**headers):
        found = client.get("/v1/state", params={"since": 0}, headers=headers).json()
        return found["rows"][-1] if found["rows"] else {"concentration": None}

    until(lambda: last(**stream)["concentration"] == 1.0)
    until(lambda: last()["concentration"] not in (None, 1.0))
    assert last(**{"X-Stream-Id": "nobody"})["concentration"] is None
    one = client.get("/v1/state", headers=stream).json()
    assert one["adapting"] == {"paused": True, "reason": "paused by an operator"}
    assert client.get("/v1/state").json()["adapting"]["reason"].startswith("learning")
    assert one["stream"]["images"] == 4
    assert state(client)["images"] == 20  # not counted again when they were learnt from


def test_a_stream_that_made_room_is_said_to_be_on_disk(tmp_path):
    def reason(stream):
        found = client.get("/v1/state", headers={"X-Stream-Id": stream}).json()
        return found["adapting"]["reason"]

    with TestClient(app(state=tmp_path, tenants_in_memory=1)) as client:
        for stream in ("one", "two"):
            predict(client, headers={"X-Stream-Id": stream})
        assert reason("one") == "on disk until its next image"
        assert reason("three") == "waiting for the first images"
        until(lambda: reason("two").startswith("learning"))


def test_weights_that_broke_start_over_and_the_batch_is_answered(tmp_path):
    with TestClient(app(lr=1e30)) as client:
        expected = predict(client, picture(9)).json()["predictions"]
        for seed in range(12):
            assert predict(client, picture(seed)).status_code == 200
        counted(client, 'action="start over"')
        client.post("/v1/adapt/reset", headers=ADMIN)
        again = predict(client, picture(9)).json()["predictions"]
        assert again[0]["labels"][0] == expected[0]["labels"][0]


# --- bounds -------------------------------------------------------------------------------------


class Held:
    """Keeps the engine from taking anything, until it is let go."""

    def __init__(self, client):
        self.client = client

    def __enter__(self):
        self.event = threading.Event()
        started = threading.Event()

        def wait():
            started.set()
            self.event.wait(20)

        self.client.app.state.service.queue.command(wait)
        started.wait(5)
        return self

    def __exit__(self, *error):
        self.event.set()


def in_threads(count, function):
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(function())) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, answers


def test_a_full_queue_refuses_at_once(tmp_path):
    with TestClient(app(max_queue=3, max_images=3)) as client:
        queue = client.app.state.service.queue
        with Held(client):
            threads, answers = in_threads(3, lambda: predict(client))
            until(lambda: queue.size == 3)
            begun = time.monotonic()
            refused = predict(client)
            assert time.monotonic() - begun < 1
            assert refused.status_code == 503
            assert int(refused.headers["Retry-After"]) >= 1
            assert client.get("/healthz").status_code == 200
        for thread in threads:
            thread.join(10)
        assert [answer.status_code for answer in answers] == [200] * 3
        assert predict(client).status_code == 200


def test_a_request_that_waits_too_long_is_dropped_unseen(tmp_path):
    with TestClient(app(queue_timeout=0.2)) as client:
        with Held(client):
            answer = predict(client)
        assert answer.status_code == 503
        assert "not answered within 0.2 s" in answer.json()["error"]
        assert "Retry-After" in answer.headers
        assert predict(client).status_code == 200
        counted(
            client,
            'moetta_images_total{outcome="expired"} 1.0',
            'moetta_images_total{outcome="answered"} 1.0',
        )


def test_too_many_streams_are_refused(tmp_path):
    with TestClient(app(max_tenants=2)) as client:
        assert predict(client, headers={"X-Stream-Id": "a"}).status_code == 200
        answer = predict(client, headers={"X-Stream-Id": "b"})
        assert answer.status_code == 429
        assert "Retry-After" in answer.headers


def test_a_failing_model_answers_every_request_once_and_goes_on(tmp_path, monkeypatch):
    with TestClient(app()) as client:
        tenant = client.app.state.service.tenants.peek("default")

        def broken(images):
            raise RuntimeError("out of luck")

        good, tenant.answering = tenant.answering, broken
        broken.on_prediction, broken.paused = None, good.paused
        broken.last, broken.steps = None, 0
        assert predict(client).status_code == 500
        tenant.answering = good
        assert predict(client).status_code == 200


# --- access -------------------------------------------------------------------------------------


def test_admin_calls_are_disabled_without_a_token(tmp_path):
    with TestClient(app(admin_token=None)) as client:
        for headers in ({}, ADMIN, {"Authorization": "Bearer "}, {"Authorization": "Bearer None"}):
            assert client.post("/v1/adapt/reset", headers=headers).status_code == 403


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer ü"]
)
def test_a_wrong_admin_token_is_refused(client, given):
    for call in ("pause", "resume", "reset", "snapshot", "rollback"):
        answer = client.post(f"/v1/adapt/{call}", headers={"Authorization": given.encode("utf-8")})
        assert answer.status_code == 401
    assert state(client)["paused"] is False


def test_api_keys(tmp_path):
    with TestClient(app(api_keys=("key-number-1", "key-number-2"))) as client:
        assert predict(client).status_code == 401
        assert predict(client, headers={"X-API-Key": "key-number-3"}).status_code == 401
        assert predict(client, headers={"X-API-Key": "key-number-2"}).status_code == 200
        assert client.get("/v1/state").status_code == 401
        assert client.get("/healthz").status_code == 200
        assert client.get("/").status_code == 200


def test_foreign_hosts_and_origins_are_refused(tmp_path):
    with TestClient(app(allowed_hosts=("mine.example",))) as client:
        assert client.get("/healthz", headers={"Host": "evil.example"}).status_code == 421
        assert client.get("/healthz", headers={"Host": "mine.example:8000"}).status_code == 200
        good = {"Host": "mine.example", "Origin": "https://mine.example"}
        assert predict(client, headers=good).status_code == 200
        bad = {"Host": "mine.example", "Origin": "https://evil.example"}
        assert predict(client, headers=bad).status_code == 403


# --- operating ----------------------------------------------------------------------------------


def admin(client, call, **params):
    return client.post(f"/v1/adapt/{call}", headers=ADMIN, params=params)


def learn(client, updates=1):
    target = state(client)["step"] + updates
    for seed in range(4 * updates):
        predict(client, picture(seed))
    until(lambda: state(client)["step"] == target)


def test_pause_and_resume(client):
    learn(client)
    assert admin(client, "pause").json() == {
        "stream": "default",
        "step": 1,
        "paused": True,
        "snapshot": None,
    }
    for seed in range(8):
        predict(client, picture(seed))
    assert state(client)["step"] == 1
    found = client.get("/v1/state").json()
    assert found["adapting"]["reason"] == "paused by an operator"
    assert admin(client, "resume").json()["paused"] is False
    learn(client)


def test_pausing_everyone(client):
    admin(client, "pause", all="true")
    for seed in range(8):
        predict(client, picture(seed), headers={"X-Stream-Id": "other"})
    assert state(client, **{"X-Stream-Id": "other"})["step"] == 0
    assert client.get("/v1/state").json()["adapting"]["paused"] is True
    admin(client, "resume", all="true")
    learn(client)


def test_snapshot_rollback_and_reset(client):
    assert admin(client, "rollback").status_code == 409
    learn(client, 2)
    assert admin(client, "snapshot").json()["snapshot"] == 1
    after_two = predict(client, picture(50)).json()["predictions"]
    learn(client, 2)
    assert predict(client, picture(50)).json()["predictions"] != after_two
    found = admin(client, "rollback").json()
    assert (found["step"], found["snapshot"]) == (2, 1)
    assert predict(client, picture(50)).json()["predictions"] == after_two
    assert admin(client, "reset").json()["step"] == 0
    assert predict(client, picture(50)).json()["predictions"] != after_two
    assert admin(client, "rollback", to=1).json()["step"] == 2
    assert predict(client, picture(50)).json()["predictions"] == after_two
    assert admin(client, "rollback", to=77).status_code == 409


def test_a_reset_in_the_middle_of_traffic(client):
    threads, answers = in_threads(
        4, lambda: [predict(client, picture(i)).status_code for i in range(15)]
    )
    for _ in range(5):
        assert admin(client, "reset").status_code == 200
        assert admin(client, "snapshot").status_code == 200
        time.sleep(0.02)
    for thread in threads:
        thread.join(30)
    assert [code for answer in answers for code in answer] == [200] * 60


def test_a_restart_continues(tmp_path):
    with TestClient(app(state=tmp_path)) as client:
        learn(client, 3)
        before = predict(client, picture(50)).json()
    with TestClient(app(state=tmp_path)) as client:
        assert state(client)["step"] == 3
        after = predict(client, picture(50)).json()
    assert after["predictions"] == before["predictions"]


def test_a_disk_that_fails_is_reported_and_survived(tmp_path, monkeypatch):
    with TestClient(app(state=tmp_path, snapshot_every=1)) as client:
        learn(client)
        import moetta.core.state

        def full(*args, **options):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(moetta.core.state, "write_atomically", full)
        learn(client, 2)
        answer = admin(client, "snapshot")
        assert answer.status_code == 507
        assert "No space left" in answer.json()["error"]
        assert 'moetta_snapshots_total{outcome="failed"}' in client.get("/metrics").text
        monkeypatch.undo()
        assert admin(client, "snapshot").status_code == 200
        assert predict(client).status_code == 200


def test_health_and_metrics(client):
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    predict(client)
    predict(client, b"nothing")
    counted(
        client,
        'moetta_requests_total{status="200"} 1.0',
        'moetta_requests_total{status="415"} 1.0',
        "moetta_request_seconds_count 1.0",
        'moetta_images_total{outcome="undecodable"} 1.0',
        "moetta_queue_limit_images 512.0",
        "moetta_ready 1.0",
        'moetta_tenants{place="memory"} 1.0',
    )
    client.app.state.service.drain()
    assert client.get("/readyz").status_code == 503
    assert client.get("/healthz").status_code == 200
    assert predict(client).status_code == 503


def test_pages_use_nothing_from_elsewhere(client):
    for path in ("/", "/docs", "/page.js", "/docs.js", "/page.css"):
        answer = client.get(path)
        assert answer.status_code == 200
        text = answer.text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        assert "http://" not in text
        assert "https://" not in text
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/predict",
        "/healthz",
        "/readyz",
        "/metrics",
        "/v1/state",
        *(f"/v1/adapt/{call}" for call in ("pause", "resume", "reset", "snapshot", "rollback")),
    }


def test_log_lines_carry_no_image_content(tmp_path, caplog):
    caplog.set_level("DEBUG")
    secret = b"very-secret-bytes-in-a-body"
    with TestClient(app(state=tmp_path)) as client:
        predict(client, secret)
        client.post("/v1/predict", json=["dmVyeS1zZWNyZXQ", secret.decode()])
        client.post("/v1/predict", files=[("image", ("very-secret-name.png", secret))])
        predict(client)
    assert "secret" not in caplog.text
    assert "dmVyeS" not in caplog.text
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert secret not in path.read_bytes()
