"""The service as users meet it: a process, a client, a browser, the API document."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from PIL import Image
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from moetta.data import embedded
from serve.running import ADMIN, TOKEN, Running
from serve.small_service import picture

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CLIENT = Path(__file__).parents[2] / "examples" / "client.py"
OVERFLOWING = """() => {
  const wide = document.documentElement.clientWidth;
  return [document.documentElement.scrollWidth - wide,
    [...document.querySelectorAll("section, figure, .tile, .result, p, dl, button, input, h1, h2")]
      .filter((e) => e.offsetParent && e.getBoundingClientRect().right > wide + 0.5)
      .map((e) => e.tagName + "#" + e.id)];
}"""

CUT_OFF = """(svg) => {
  const { bottom } = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("text")]
    .filter((e) => e.getBoundingClientRect().bottom > bottom + 0.5).map((e) => e.textContent);
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("state"), "--learn-samples", "8") as found:
        yield found


class Load:
    """A few clients that never stop, until the block ends."""

    def __init__(self, server: Running, clients: int = 4) -> None:
        self.server = server
        self.codes: list[int] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, args=(seed,), daemon=True)
            for seed in range(clients)
        ]

    def _send(self, seed: int) -> None:
        while not self._over.is_set():
            seed += 1
            self.codes.append(self.server.predict(picture(seed, side=32)).status_code)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)


def test_out_of_the_box_it_reads_numbers(server: Running) -> None:
    bright = embedded.domain("c/brightness", severity=1, count=48)
    files = []
    for image in bright.images:
        out = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(out, "PNG")
        files.append(base64.b64encode(out.getvalue()).decode())
    url = server.url + "/v1/predict?top_k=1&explain=1"
    answer = httpx.post(url, json=files, timeout=60).json()
    found = [one["labels"][0]["label"] for one in answer["predictions"]]
    right = [
        label == f"{int(number):02d}" for label, number in zip(found, bright.labels, strict=True)
    ]
    assert sum(right) >= 40
    assert all(one["experts"] for one in answer["predictions"])
    assert server.state()["model"] == "digits-vit"


def test_the_example_client(server: Running, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(picture())
    command = [sys.executable, str(CLIENT), "--url", server.url, str(path), str(CLIENT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1  # one of the two is not an image
    assert "a.png" in done.stdout
    assert "%" in done.stdout
    assert "not a JPEG, PNG or WebP image" in done.stdout


def test_the_curl_lines_of_the_docs(server: Running, tmp_path: Path) -> None:
    files = {"image.png": "PNG", "one.jpg": "JPEG", "two.webp": "WEBP", "frame.jpg": "JPEG"}
    for name, kind in files.items():
        (tmp_path / name).write_bytes(picture(kind=kind, side=32))
    text = (CLIENT.parents[1] / "docs" / "serve.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("curl ")]
    lines += re.findall(r"`(curl [^`]+)`", text)
    assert len(lines) == 7
    environment = {**os.environ, "MOETTA_ADMIN_TOKEN": TOKEN}
    try:
        for line in lines:
            command = line.replace("http://127.0.0.1:8000", server.url)
            done = subprocess.run(
                ["bash", "-c", f"{command} -sS"],
                cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            answer = json.loads(done.stdout or "{}")
            assert "error" not in answer, line
            assert "stream" in answer, (line, done.stderr)
    finally:
        server.admin("resume")


class Refuses(BaseHTTPRequestHandler):
    """Refuses twice, then answers; notes when it was asked."""

    asked: ClassVar[list[float]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(time.monotonic())
        status = {1: 503, 2: 429}.get(len(self.asked), 200)
        labels = [{"label": "42", "class": 42, "probability": 0.98}]
        found = {"predictions": [{"labels": labels}]} if status == 200 else {"error": "busy"}
        self.send_response(status)
        if status != 200:
            self.send_header("Retry-After", "1")
        body = json.dumps(found).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize(("tries", "said"), [(3, "42 98.0%"), (2, "busy")])
def test_the_example_client_tries_again_as_it_is_told(
    tmp_path: Path, tries: int, said: str
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(picture())
    Refuses.asked.clear()
    with HTTPServer(("127.0.0.1", 0), Refuses) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{refusing.server_port}"
        command = [sys.executable, str(CLIENT), "--url", url, "--tries", str(tries), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        refusing.shutdown()
    assert said in done.stdout, done.stderr
    assert len(Refuses.asked) == tries
    waits = [b - a for a, b in itertools.pairwise(Refuses.asked)]
    assert all(wait > 0.75 for wait in waits)  # the second asked for, give or take a fifth


# --- the API document ---------------------------------------------------------------------------


def test_the_service_does_what_its_document_says(server: Running) -> None:
    document = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) == 10
    for operation in operations:
        # That bytes are an image is more than a schema can say.
        skipped = [positive_data_acceptance] if operation.path == "/v1/predict" else []
        admin = operation.path.startswith("/v1/adapt")
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            # With the token in place, a request that lacks only the token would be a good one.
            headers = ADMIN if admin and mode is GenerationMode.POSITIVE else {}
            try:
                cases = operation.as_strategy(generation_mode=mode)
                conforms(cases, headers, skipped)
            except Unsatisfiable:
                assert mode is GenerationMode.NEGATIVE  # nothing that could be wrong


def conforms(cases: Any, headers: dict[str, str], skipped: list[Any]) -> None:
    @given(case=cases)
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: Any) -> None:
        case.call_and_validate(excluded_checks=skipped, headers=headers)

    check()


# --- the page -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs the playwright package")
    if CHROMIUM is None:
        pytest.skip("needs Debian's chromium")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Any, server: Running, path: str, width: int) -> tuple[Any, list[str]]:
    context = browser.new_context(viewport={"width": width, "height": 900})
    context.set_default_timeout(60_000)
    tab = context.new_page()
    troubles: list[str] = []
    tab.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: troubles.append(str(error)))

    def outside(request: Any) -> None:
        if not request.url.startswith((server.url, "blob:", "data:")):
            troubles.append(request.url)

    tab.on("request", outside)
    tab.goto(server.url + path)
    return tab, troubles


def until(tab: Any, condition: str, seconds: float = 60) -> None:
    """Playwright's own waiting evaluates text in the page, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not tab.evaluate(condition):
        assert time.monotonic() < end, condition
        tab.wait_for_timeout(50)


@pytest.mark.parametrize("width", [375, 1280])
def test_the_page_under_load(browser: Any, server: Running, tmp_path: Path, width: int) -> None:
    with Load(server) as load:
        tab, troubles = opened(browser, server, "/", width)
        until(tab, "Number(document.querySelector('#rate').textContent) > 0")
        until(tab, "document.querySelectorAll('#experts rect').length > 50")
        assert "%" in tab.locator("#experts-scale").text_content()
        until(tab, "Number(document.querySelector('#step').textContent) > 0")
        until(tab, "document.querySelector('#adapting').className.includes('good')")
        for chart in ("requests", "latency", "queue", "batches", "entropy", "concentration"):
            path = tab.locator(f"#c-{chart} path").first.get_attribute("d")
            assert path.startswith("M"), chart
            assert tab.locator(f"#c-{chart}").evaluate(CUT_OFF) == [], chart
        good, bad = tmp_path / "good.png", tmp_path / "bad.png"
        good.write_bytes(picture())
        bad.write_bytes(b"nothing")
        tab.locator("#file").set_input_files([str(good), str(bad)])
        until(tab, "document.querySelectorAll('.result progress').length === 3")
        tab.wait_for_selector(".result .error")
        assert "not a JPEG" in tab.locator(".result .error").text_content()
        assert tab.evaluate(OVERFLOWING) == [0, []]
        hidden = "(e) => e.parentElement.scrollWidth - e.parentElement.clientWidth"
        assert tab.locator("#experts").evaluate(hidden) == 0  # every expert is in view
    assert set(load.codes) == {200}
    # A browser tells the console about every refused request; the rest must be silent.
    assert [line for line in troubles if "415" not in line] == []
    tab.context.close()


def test_admin_buttons_come_with_the_token(browser: Any, server: Running) -> None:
    tab, troubles = opened(browser, server, "/", 375)
    tab.wait_for_selector("#token-label:not([hidden])")
    assert not tab.locator("#admin").is_visible()
    tab.locator("#token").fill(TOKEN)
    tab.get_by_role("button", name="Pause learning").click()
    until(tab, "document.querySelector('#said').textContent.includes('paused')")
    assert server.state()["stream"]["paused"] is True
    assert tab.evaluate(OVERFLOWING) == [0, []]
    tab.get_by_role("button", name="Resume").click()
    until(tab, "!document.querySelector('#said').textContent.includes('paused')")
    assert server.state()["stream"]["paused"] is False
    tab.locator("#token").fill("wrong")
    tab.get_by_role("button", name="Save a snapshot").click()
    until(tab, "document.querySelector('#said').textContent.includes('wrong')")
    assert [line for line in troubles if "401" not in line] == []
    tab.context.close()


DROPPED = """(text) => {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], "dropped.png", { type: "image/png" }));
  return data;
}"""


def test_an_image_is_dropped_and_the_stream_reset(browser: Any, server: Running) -> None:
    for seed in range(8):  # one update
        server.predict(picture(seed))
    tab, troubles = opened(browser, server, "/", 375)
    image = tab.evaluate_handle(DROPPED, base64.b64encode(picture()).decode())
    tab.dispatch_event("#drop", "drop", {"dataTransfer": image})
    until(tab, "document.querySelectorAll('.result progress').length === 3")
    assert "answered at update" in tab.locator(".result").text_content()
    assert server.state()["stream"]["step"] > 0
    tab.locator("#token").fill(TOKEN)
    questions: list[str] = []
    answers = iter([False, True])

    def decide(dialog: Any) -> None:
        questions.append(dialog.message)
        dialog.accept() if next(answers) else dialog.dismiss()

    tab.on("dialog", decide)
    reset = tab.get_by_role("button", name="Reset to the source model")
    reset.click()
    assert server.state()["stream"]["step"] > 0  # not without a yes
    reset.click()
    until(tab, "document.querySelector('#said').textContent.includes('at update 0')")
    assert server.state()["stream"]["step"] == 0
    assert len(questions) == 2
    assert troubles == []
    tab.context.close()


@pytest.mark.parametrize("width", [375, 1280])
def test_the_api_page(browser: Any, server: Running, width: int) -> None:
    tab, troubles = opened(browser, server, "/docs", width)
    tab.wait_for_selector("details.op")
    assert tab.locator("details.op").count() == 10
    tab.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert "X-Stream-Id" in tab.locator("main").text_content()
    assert tab.evaluate(OVERFLOWING) == [0, []]
    assert troubles == []
    tab.context.close()
