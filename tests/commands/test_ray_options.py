"""`--ray`: what is wrong with it is found at once, and the message says what to do."""

from __future__ import annotations

import http.server
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moetta.commands.main import main

RUN = ["run", "--method", "tent", "--stream", "classical", "--limit", "64"]


@pytest.fixture
def web_server() -> Iterator[int]:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main([*RUN, *options]) == 1
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield
    assert not (tmp_path / "runs").exists()  # nothing has been started


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--ray", "--workers", "2"], "--ray and --workers exclude each other"),
        (["--ray", "table1"], "'table1' is not the address of a Ray cluster; expected auto"),
        (["--ray", "ray://:10001"], "is not the address of a Ray cluster"),
        (["--ray", "host:notaport"], "is not the address of a Ray cluster"),
        (["--ray", "host:"], "is not the address of a Ray cluster"),
        (["--ray", "host:0"], "is not the address of a Ray cluster"),
        (["--ray", "host:99999"], "is not the address of a Ray cluster"),
        (["--ray", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
        (["--ray", "ray://127.0.0.1:1"], "start one with ray start --head"),
        (["--ray", "no-such-host.invalid:6379"], "no Ray cluster answers at no-such-host.invalid"),
        (["--store", "s3://bucket/runs"], "--store needs --ray"),
        (["--out", "s3://bucket/runs", "--ray"], "--out must be a folder, got s3:/bucket/runs"),
        (["--ray", "--store", "nonsense://x"], "cannot be used to store runs"),
        (["--ray", "--method", "tint"], "did you mean"),
        (["--ray", "--device", "cuda:0"], "Ray chooses which GPU a run gets"),
    ],
)
def test_refused_at_once(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    message = refusal(capsys, *options)
    assert expected in message
    assert "Traceback" not in message
    assert time.monotonic() - begun < 20


def test_something_else_listens(web_server: int, capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    assert "something else listens there" in refusal(capsys, "--ray", f"127.0.0.1:{web_server}")
    assert time.monotonic() - begun < 20  # Ray would try for 40 s


def test_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'moetta[ray]'" in refusal(capsys, "--ray")


def test_ray_is_imported_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it would raise
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
