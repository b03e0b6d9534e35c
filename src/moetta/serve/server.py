"""Running the application: connections within bounds, and a clean end on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from moetta.serve.settings import Settings

log = logging.getLogger("moetta.serve")
FULL = b"HTTP/1.1 503 Service Unavailable\r\n" + (
    b"Retry-After: 1\r\nContent-Type: application/json\r\nContent-Length: 33\r\n"
    b'Connection: close\r\n\r\n{"error": "too many connections"}'
)


def run(app: Starlette, settings: Settings, on_ready: Callable[[str], None] | None = None) -> bool:
    """Serve until SIGTERM or SIGINT, then answer what was accepted, save, and return.

    Args:
        app: what `create_app` made.
        settings: the same ones.
        on_ready: called with the service's address when requests are accepted.

    Returns:
        Whether everything that was learnt is saved.

    Raises:
        OSError: the address cannot be bound.
    """
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=bounded_protocol(settings),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        backlog=1024,
        lifespan="on",
    )
    # The event loop shares the interpreter with the engine, and its turns are short.
    sys.setswitchinterval(0.001)
    sockets = [config.bind_socket()]
    server = Server(config, app.state.service)
    server.on_ready = on_ready
    try:
        asyncio.run(server.serve(sockets))
    finally:
        for opened in sockets:
            opened.close()
    if not server.started:
        raise OSError("the service could not start; the log says why")
    saved: bool = app.state.service.saved
    return saved


class Drains(Protocol):
    """A service that a signal can stop."""

    def drain(self) -> None:
        """Accept nothing more. Called from a signal handler."""


class Server(uvicorn.Server):
    """Ends with exit code 0 after a signal, once everything is answered and saved."""

    on_ready: Callable[[str], None] | None = None

    def __init__(self, config: uvicorn.Config, service: Drains) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: Any = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        if self.started and self.on_ready is not None and sockets:
            host, port = sockets[0].getsockname()[:2]
            self.on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Drain on the first signal; uvicorn's own version would end the process by it."""
        loop = asyncio.get_running_loop()
        handled = (signal.SIGTERM, signal.SIGINT)
        for number in handled:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        if self.should_exit:
            log.warning("%s again: leaving at once", signal.Signals(number).name)
            # Nothing can hold this up, neither a client nor a disk. Snapshots are renamed into
            # place whole, so the last one is good.
            os._exit(1)
        else:
            log.info("%s: finishing what was accepted", signal.Signals(number).name)
            self._service.drain()
            self.should_exit = True


def bounded_protocol(settings: Settings) -> type[asyncio.Protocol]:
    """The HTTP protocol with a bound on connections and on the time that headers may take."""

    class Bounded(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # asyncio does this only for sockets that name their protocol; without it, an answer's
            # body waits 40 ms for the client to acknowledge its headers.
            with contextlib.suppress(OSError):
                transport.get_extra_info("socket").setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
                )
            if len(self.connections) > settings.max_connections:
                transport.write(FULL)
                transport.close()
                return
            self._wait_for_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._reads_headers():
                if self._timer is None:
                    self._wait_for_headers()
            elif self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        def _reads_headers(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _wait_for_headers(self) -> None:
            self._timer = self.loop.call_later(settings.header_timeout, self._too_slow)

        def _too_slow(self) -> None:
            self._timer = None
            if self._reads_headers() and not self.transport.is_closing():
                self.transport.close()

    return Bounded
