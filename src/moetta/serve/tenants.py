"""Tenants: adapters over one frozen network, a few of them in memory, the others on disk."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from moetta.core.adapter import Adapter
from moetta.files import write_atomically
from moetta.serve.refusal import Refusal
from moetta.serve.settings import Settings
from moetta.serve.snapshots import Snapshot, Snapshots
from moetta.serve.tenant import DEFAULT, Answering, Build, Tenant

log = logging.getLogger("moetta.serve")


class Tenants:
    """All tenants. Only the engine's thread calls it, unless a method says otherwise."""

    def __init__(
        self,
        build: Build,
        settings: Settings,
        on_saved: Callable[[bool], None] = lambda good: None,
    ) -> None:
        self._build = build
        self._settings = settings
        self._on_saved = on_saved
        self._here: OrderedDict[str, Tenant] = OrderedDict()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="moetta-snapshots")
        self._known: set[str] = {DEFAULT}
        self._spare: tuple[Answering, Adapter] | None = build()
        self.on_new: Callable[[Tenant], None] = lambda tenant: None
        """Called with every tenant that comes into memory; if it raises, the tenant does not."""
        self.on_evict: Callable[[Tenant], None] = lambda tenant: None
        """Called with a tenant that makes room for another one."""
        self.folder: Path | None = None
        if settings.state is not None:
            self.folder = settings.state / _identity(*self._spare)
            if not self.folder.is_dir() and (others := _others(self.folder)):
                log.warning(
                    "no state of this model and configuration in %s, which starts as the source "
                    "model; there is state of others: %s",
                    settings.state,
                    ", ".join(others),
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            self._known |= set(_names(self.folder))

    def __len__(self) -> int:
        """Tenants in memory."""
        return len(self._here)

    def __iter__(self) -> Iterator[Tenant]:
        """Those in memory."""
        return iter(list(self._here.values()))

    @property
    def known(self) -> int:
        """Tenants in memory or on disk; any thread may ask."""
        return len(self._known)

    def peek(self, name: str) -> Tenant | None:
        """A tenant if it is in memory; any thread may ask, and should only read."""
        return self._here.get(name)

    def is_known(self, name: str) -> bool:
        """Whether a tenant is in memory or on disk; any thread may ask."""
        return name in self._known

    def may_exist(self, name: str) -> None:
        """Refuse a tenant that would be one too many; any thread may ask.

        Raises:
            Refusal: 429; there are too many.
        """
        if name not in self._known and len(self._known) >= self._settings.max_tenants:
            raise Refusal(
                429,
                f"there are {len(self._known)} streams already, and no more are accepted; use one "
                "of them, or raise --max-tenants",
                retry_after=60,
            )

    def get(self, name: str) -> Tenant:
        """A tenant, from memory, from disk, or new.

        Raises:
            Refusal: 429 if there are too many, 503 if there is no room and none can be made.
        """
        found = self._here.get(name)
        if found is not None:
            self._here.move_to_end(name)
            return found
        self.may_exist(name)
        self._make_room()
        answering, adapter = self._spare or self._build()
        self._spare = None
        tenant = Tenant(name, answering, adapter, self._snapshots(name))
        if tenant.snapshots is not None:
            restored = tenant.snapshots.restore(answering.load)
            if restored is not None:
                log.info("stream %s continues at step %d", name, answering.steps)
        try:
            self.on_new(tenant)
        except Refusal:
            self._spare = (answering, adapter)
            raise
        self._here[name] = tenant
        self._known.add(name)
        return tenant

    def example(self) -> Adapter:
        """An adapter as new tenants get it; before the first of them only."""
        assert self._spare is not None
        return self._spare[1]

    def _snapshots(self, name: str) -> Snapshots | None:
        if self.folder is None:
            return None
        # A hash, since file systems differ in what names they take and which they hold for equal.
        folder = self.folder / hashlib.sha256(name.encode()).hexdigest()[:32]
        return Snapshots(folder, self._settings.snapshots_kept)

    def _make_room(self) -> None:
        while len(self._here) >= self._settings.tenants_in_memory:
            name, oldest = next(iter(self._here.items()))
            try:
                self.save(oldest)
            except OSError:
                raise Refusal(
                    503,
                    "there is no room for another stream, as the state of the least recently used "
                    "one cannot be saved",
                    retry_after=10,
                ) from None
            self.on_evict(oldest)
            del self._here[name]
            if oldest.snapshots is None:  # nothing is kept: it would start again as a new one
                self._known.discard(name)

    # --- saving ---------------------------------------------------------------------------------

    def save(self, tenant: Tenant) -> Snapshot | None:
        """Write a snapshot now, unless nothing has changed since the latest one.

        Raises:
            OSError: it could not be written.
        """
        if tenant.snapshots is None:
            return None
        if tenant.saving is not None:
            with suppress(OSError):  # then the one below says what is wrong
                tenant.saving.result()
        latest = next(iter(tenant.snapshots.found()), None)
        if not tenant.unsaved and (latest is None or latest.is_whole()):
            return latest
        return self._write(tenant)

    def save_if_due(self, tenant: Tenant) -> None:
        """Have a snapshot written in the background if enough updates have passed."""
        if tenant.snapshots is None or tenant.unsaved < self._settings.snapshot_every:
            return
        if tenant.saving is None or tenant.saving.done():
            tenant.saving = self._writer.submit(self._write, tenant)

    def _write(self, tenant: Tenant) -> Snapshot:
        assert tenant.snapshots is not None
        # What is learnt while the file is written counts as unsaved; after a failure, all of it.
        before, tenant.unsaved = tenant.unsaved, 0
        try:
            snapshot = tenant.snapshots.save(tenant.answering.save)
            name = tenant.snapshots.folder / "name"
            if not name.is_file():
                write_atomically(name, tenant.name.encode())
        except OSError as error:
            # Not at once again: the disk will hardly be better at the next update.
            tenant.unsaved = max(1, before // 2)
            self._on_saved(False)
            log.error("the state of stream %s could not be saved: %s", tenant.name, error)
            raise
        self._on_saved(True)
        return snapshot

    def close(self) -> bool:
        """Save everything that is in memory; False if something could not be."""
        good = True
        for tenant in self:
            try:
                self.save(tenant)
            except OSError:
                good = False
        self._writer.shutdown()
        return good


def _identity(answering: Answering, adapter: Adapter) -> str:
    """A folder name for this method, configuration and model: their states fit no others."""
    config = json.dumps(adapter.config.to_dict(), sort_keys=True)
    digest = hashlib.sha256(f"{config} {adapter.fingerprint()}".encode()).hexdigest()
    return f"{adapter.method}{'' if answering is adapter else '-guarded'}-{digest[:16]}"


def _names(folder: Path) -> Iterator[str]:
    for path in folder.glob("*/name"):
        try:
            yield path.read_text()
        except (OSError, ValueError):
            log.warning("%s cannot be read", path)


def _others(folder: Path) -> list[str]:
    return [path.name for path in folder.parent.glob("*-*") if path.is_dir()]
