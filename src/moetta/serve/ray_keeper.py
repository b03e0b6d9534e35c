"""The one actor that keeps what replicas share: merged states, their snapshots, and pauses."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save as to_bytes
from torch import Tensor

from moetta.files import read_safetensors, write_atomically
from moetta.serve.merge import Contribution, State, merge
from moetta.serve.refusal import Refusal
from moetta.serve.snapshots import Snapshot, Snapshots

log = logging.getLogger("moetta.serve")
REPLY = 15.0
"""Seconds in which replicas must answer; they do so between two batches."""


@dataclass
class Merged:
    """One stream's merged state.

    Attributes:
        version: counts up with every merge, reset and rollback.
        state: the state itself.
        merges: merges since the start.
        saved_at: the step of the latest snapshot.
    """

    version: int
    state: State
    merges: int = 0
    saved_at: int = 0

    @property
    def steps(self) -> int:
        """The steps of all replicas together."""
        return int(self.state["counters"][0])


class Keeper:
    """Merges, saves, and tells new replicas where to start. A named actor; its methods are async.

    Args:
        app: the application whose replicas it speaks to.
        folder: where snapshots go; None keeps none.
        keep: snapshots to keep per stream.
        every: steps between two snapshots.
        verbose: log more.
    """

    def __init__(
        self, app: str, folder: Path | None, keep: int, every: int, verbose: bool = False
    ) -> None:
        logging.basicConfig(
            level=logging.INFO if verbose else logging.WARNING,
            format="%(asctime)s %(levelname)s %(message)s",
            stream=sys.stderr,
        )
        self._app = app
        self._folder = folder
        self._keep = keep
        self._every = every
        self._identity: dict[str, str] | None = None
        self._initial: State = {}
        self._merged: dict[str, Merged] = {}
        self._left: dict[str, list[Contribution]] = {}
        self._due: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._one = asyncio.Lock()
        self._paused_all = False
        self._paused: set[str] = set()
        self._failed = False
        self._handle: Any = None

    # --- replicas that come and go --------------------------------------------------------------

    async def introduce(
        self, identity: dict[str, str], initial: State, held: dict[str, tuple[int, State]]
    ) -> None:
        """Learn from a replica what is merged here.

        Args:
            identity: what the states belong to.
            initial: the state before any learning.
            held: merged states by stream, with their versions. This actor may have been restarted,
                and then replicas know better.
        """
        if self._identity is None:
            self._identity, self._initial = identity, initial
        elif self._identity != identity:
            raise ValueError("replicas differ in model, method or configuration")
        for stream, (version, state) in held.items():
            if version > self._get(stream).version:
                self._merged[stream] = Merged(version, state)

    async def _introduced(self) -> None:
        """After a restart, ask the replicas."""
        if self._identity is None:
            for reply in await self._broadcast("introduction"):
                if isinstance(reply, dict):
                    await self.introduce(reply["identity"], reply["initial"], reply["held"])
                    self._paused_all |= reply["paused_all"]
                    self._paused |= set(reply["paused"])
        if self._identity is None:
            raise Refusal(503, "no replica is there yet; try again", retry_after=2)

    async def state(self, stream: str) -> tuple[int, State]:
        """Version and state of a stream, from which a replica starts."""
        await self._introduced()
        merged = self._get(stream)
        return merged.version, merged.state

    def _get(self, stream: str) -> Merged:
        found = self._merged.get(stream)
        if found is None:
            found = Merged(0, self._initial)
            state: State = {}
            if (snapshots := self._snapshots(stream)) is not None:
                snapshots.restore(lambda path: state.update(self._read(path)))
            if state:
                found = Merged(1, state)
                found.saved_at = found.steps
                log.warning("stream %s continues at step %d", stream, found.steps)
            self._merged[stream] = found
        return found

    async def leave(self, stream: str, version: int, contribution: Contribution) -> None:
        """Take what a replica has learnt from a stream that it drops; the next merge counts it."""
        await self._introduced()
        if version == self._get(stream).version:
            self._left.setdefault(stream, []).append(contribution)

    # --- merging --------------------------------------------------------------------------------

    async def due(self, stream: str) -> None:
        """A replica has learnt enough from a stream: merge soon."""
        if stream not in self._due:
            self._due.add(stream)
            task = asyncio.create_task(self._merge_soon(stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _merge_soon(self, stream: str) -> None:
        try:
            async with self._one:
                self._due.discard(stream)
                merged = await self._merge(stream)
                if merged.steps - merged.saved_at >= self._every:
                    await self._save(stream)
        except OSError:
            pass  # logged, and counted as not saved
        except Exception:
            log.exception("stream %s could not be merged; the next merge tries again", stream)
            self._due.discard(stream)

    async def _merge(self, stream: str) -> Merged:
        await self._introduced()
        before = self._get(stream)
        replies = await self._broadcast("contribute", stream, before.version)
        parts = [reply for reply in replies if isinstance(reply, Contribution)]
        parts += self._left.pop(stream, [])
        state = await asyncio.to_thread(merge, before.state, parts)
        merged = Merged(before.version + 1, state, before.merges + 1, before.saved_at)
        self._merged[stream] = merged
        await self._broadcast("adopt", stream, merged.version, state)
        log.info("merged stream %s from %d replicas, step %d", stream, len(parts), merged.steps)
        return merged

    async def _broadcast(self, method: str, *args: Any) -> list[Any]:
        """Every replica's answer, or the error in its place."""
        if self._handle is None:
            from ray import serve

            self._handle = await asyncio.to_thread(serve.get_app_handle, self._app)
        response = self._handle.broadcast(method, *args)
        replies: list[Any] = await response.results_async(timeout_s=REPLY, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                log.warning("a replica did not take part in %s: %r", method, reply)
        return replies

    # --- for the admin --------------------------------------------------------------------------

    async def reset(self, stream: str) -> dict[str, Any]:
        """All replicas return to the source model."""
        async with self._one:
            await self._introduced()
            merged = await self._set(stream, self._initial)
            return {"step": merged.steps, "snapshot": await self._number(stream)}

    async def snapshot(self, stream: str) -> dict[str, Any]:
        """Merge and save now."""
        async with self._one:
            merged = await self._merge(stream)
            return {"step": merged.steps, "snapshot": await self._number(stream)}

    async def rollback(self, stream: str, to: int | None) -> dict[str, Any] | None:
        """All replicas return to a snapshot; None if there is none."""
        async with self._one:
            await self._introduced()
            snapshots, state = self._snapshots(stream), dict[str, Tensor]()
            found = snapshots and snapshots.restore(lambda p: state.update(self._read(p)), to)
            if not found:
                return None
            merged = await self._set(stream, state)
            if snapshots is not None and found.number != snapshots.numbers[0]:
                await self._save(stream)  # a restart should continue from here
            return {"step": merged.steps, "snapshot": found.number}

    async def _set(self, stream: str, state: State) -> Merged:
        merged = Merged(self._get(stream).version + 1, state)
        merged.saved_at = merged.steps
        self._merged[stream] = merged
        self._left.pop(stream, None)
        await self._broadcast("adopt", stream, merged.version, state, True)
        return merged

    async def pause(self, stream: str, everyone: bool, paused: bool) -> None:
        """Remember a pause for replicas that start later."""
        if everyone:
            self._paused_all = paused
        elif paused:
            self._paused.add(stream)
        else:
            self._paused.discard(stream)

    async def pauses(self) -> dict[str, Any]:
        """What is paused."""
        return {"all": self._paused_all, "streams": sorted(self._paused)}

    async def facts(self, stream: str) -> dict[str, Any]:
        """What /v1/state says about merging."""
        await self._introduced()
        merged = self._merged.get(stream)
        snapshots = self._snapshots(stream)
        return {
            "version": 0 if merged is None else merged.version,
            "merges": 0 if merged is None else merged.merges,
            "step": 0 if merged is None else merged.steps,
            "snapshots": [] if snapshots is None else [s.number for s in snapshots.found()],
        }

    async def finish(self) -> bool:
        """Merge and save everything, at the end; whether it could be saved."""
        try:
            await self._introduced()
        except Exception as error:
            log.error("no replica can say what was learnt: %s", error)
            return False
        async with self._one:
            for stream in list(self._merged):
                try:
                    merged = await self._merge(stream)
                    if merged.steps != merged.saved_at:
                        await self._save(stream)
                except Exception as error:
                    self._failed = True
                    log.error("the state of stream %s could not be saved: %s", stream, error)
        return not self._failed

    # --- files ----------------------------------------------------------------------------------

    def _snapshots(self, stream: str) -> Snapshots | None:
        if self._folder is None or self._identity is None:
            return None
        config = f"{self._identity['config']} {self._identity['model']}"
        digest = hashlib.sha256(config.encode()).hexdigest()[:16]
        folder = self._folder / f"{self._identity['method']}-merged-{digest}"
        name = hashlib.sha256(stream.encode()).hexdigest()[:32]
        return Snapshots(folder / name, self._keep)

    def _read(self, path: Path) -> State:
        tensors, metadata = read_safetensors(path)
        if metadata != self._identity:
            raise ValueError("saved for another model, method or configuration")
        return tensors

    async def _number(self, stream: str) -> int | None:
        saved = await self._save(stream)
        return None if saved is None else saved.number

    async def _save(self, stream: str) -> Snapshot | None:
        snapshots, merged = self._snapshots(stream), self._get(stream)
        if snapshots is None:
            return None
        content = to_bytes({k: v.contiguous() for k, v in merged.state.items()}, self._identity)

        def write() -> Snapshot:
            new = not snapshots.folder.is_dir()
            saved = snapshots.save(lambda path: write_atomically(path, content))
            if new:
                (snapshots.folder / "name").write_text(stream)
            return saved

        try:
            saved = await asyncio.to_thread(write)
        except OSError as error:
            self._failed = True
            log.error("the state of stream %s could not be saved: %s", stream, error)
            raise
        self._failed = False
        merged.saved_at = merged.steps
        return saved
