"""Every bound of the service, with its default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Settings:
    """How the service listens, batches, learns, refuses and saves.

    Attributes:
        host: address to bind.
        port: port to bind; 0 takes a free one.
        allowed_hosts: names under which the service may be called (the Host header); empty means
            the loopback names if it binds to loopback, and any name otherwise.
        max_batch: images in one forward pass.
        max_wait_ms: how long a batch waits for company.
        learn_samples: images in one update; smaller batches are pooled until there are as many.
        learn_queue: with more images than this waiting, batches are answered without learning;
            None is twice max_batch, or half of max_queue if that is less.
        max_queue: images that may wait; beyond it requests are refused.
        max_queue_per_tenant: images of one tenant that may wait; None is max_queue.
        queue_timeout: seconds an image may wait before it is dropped.
        max_body: bytes of one request's body.
        max_buffered: bytes of all bodies that are being read at one time.
        max_pixels: pixels of one image.
        max_images: images in one request.
        body_timeout: seconds a client has to send its body.
        header_timeout: seconds a client has to send its request line and headers.
        max_connections: open connections.
        decode_threads: threads that decode large images.
        max_tenants: tenants that may exist, in memory or on disk.
        tenants_in_memory: tenants whose state is in memory; the others wait on disk.
        state: folder of the snapshots; None keeps nothing.
        snapshot_every: updates of a tenant between two snapshots.
        snapshots_kept: snapshots of a tenant that are kept.
        admin_token: opens the admin calls; None disables them.
        api_keys: keys of which a client must send one; none means that no key is needed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    max_batch: int = 64
    max_wait_ms: float = 5.0
    learn_samples: int = 32
    learn_queue: int | None = None
    max_queue: int = 512
    max_queue_per_tenant: int | None = None
    queue_timeout: float = 5.0
    max_body: int = 10_000_000
    max_buffered: int = 256_000_000
    max_pixels: int = 32_000_000
    max_images: int = 64
    body_timeout: float = 10.0
    header_timeout: float = 10.0
    max_connections: int = 1000
    decode_threads: int = 2
    max_tenants: int = 1000
    tenants_in_memory: int = 16
    state: Path | None = None
    snapshot_every: int = 100
    snapshots_kept: int = 3
    admin_token: str | None = None
    api_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that no service can run with."""
        for name in (
            "max_batch",
            "learn_samples",
            "max_queue",
            "queue_timeout",
            "max_body",
            "max_buffered",
            "max_pixels",
            "max_images",
            "body_timeout",
            "header_timeout",
            "max_connections",
            "decode_threads",
            "max_tenants",
            "tenants_in_memory",
            "snapshot_every",
            "snapshots_kept",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.max_wait_ms < 0:
            raise ValueError(f"max_wait_ms must be at least 0, got {self.max_wait_ms}")
        if self.max_images > self.max_queue:
            raise ValueError(
                f"max_images must be at most max_queue={self.max_queue}, or a full request could "
                f"never be accepted; got {self.max_images}"
            )
        for name, secrets in (
            ("the admin token", (self.admin_token,) if self.admin_token is not None else ()),
            ("an API key", self.api_keys),
        ):
            for secret in secrets:
                if len(secret) < 8 or not secret.isascii() or not secret.isprintable():
                    raise ValueError(f"{name} must be 8 or more printable ASCII characters")

    @property
    def pressure(self) -> int:
        """The number of waiting images beyond which nothing is learnt."""
        if self.learn_queue is not None:
            return self.learn_queue
        return min(2 * self.max_batch, self.max_queue // 2)

    @property
    def tenant_share(self) -> int:
        """The number of images of one tenant that may wait."""
        return self.max_queue if self.max_queue_per_tenant is None else self.max_queue_per_tenant

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names under which the service may be called; None is any."""
        if self.allowed_hosts:
            return frozenset(self.allowed_hosts) | frozenset(LOOPBACK)
        return frozenset(LOOPBACK) if self.host in LOOPBACK else None
