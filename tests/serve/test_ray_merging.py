"""A replica's side of merging, and the keeper, without Ray: two services in one process."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import moetta
from helpers.models import small_vit
from moetta.serve.merge import Contribution
from moetta.serve.ray_keeper import Keeper
from moetta.serve.ray_merging import STALE, Merging, identity
from moetta.serve.refusal import Refusal
from moetta.serve.service import Service
from moetta.serve.settings import Settings
from moetta.serve.tenants import DEFAULT, Tenant
from serve.small_service import classifier


class FakeKeeper:
    """What a replica calls, as Ray would offer it."""

    def __init__(self) -> None:
        self.dues: list[str] = []
        self.left: list[tuple[str, int, Contribution]] = []
        self.answer: Any = None

    def __getattr__(self, name: str) -> Any:
        return _Method(getattr(self, f"do_{name}"))

    def do_due(self, stream: str) -> None:
        self.dues.append(stream)

    def do_leave(self, stream: str, version: int, given: Contribution) -> None:
        self.left.append((stream, version, given))

    def do_state(self, stream: str) -> Any:
        return self.answer


class _Method:
    def __init__(self, function: Any) -> None:
        self._function = function

    def remote(self, *args: Any) -> Any:
        found: Future[Any] = Future()
        found.set_result(self._function(*args))
        return found


class Replica:
    """A service's engine side, driven by hand: no thread, no HTTP."""

    def __init__(self, guarded: bool = False, every: int = 2) -> None:
        model = small_vit()

        def build() -> Any:
            adapter = moetta.adapt(model, "moetta")
            return (moetta.Guard(adapter) if guarded else adapter), adapter

        self.keeper = FakeKeeper()
        self.service = Service(classifier(model), build, Settings(learn_samples=4))
        self.merging = Merging(self.service, self.keeper, every)
        self.keeper.answer = (1, self.merging.introduction()["initial"])
        self.service.tenants.on_new = self.merging.begin
        self.seed = 0

    @property
    def tenant(self) -> Tenant:
        return self.service.tenants.get(DEFAULT)

    def learn(self, times: int = 1) -> None:
        for _ in range(times):
            self.seed += 1
            generator = torch.Generator().manual_seed(self.seed)
            self.service.engine._learn(self.tenant, torch.randn(4, 3, 16, 16, generator=generator))


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "get", lambda future, timeout: future.result(timeout))


def test_a_merge_is_due_after_so_many_updates_and_again_until_it_happens() -> None:
    replica = Replica(every=2)
    replica.learn()
    assert replica.keeper.dues == []
    replica.learn()
    assert replica.keeper.dues == [DEFAULT]
    replica.learn(2)
    assert replica.keeper.dues == [DEFAULT, DEFAULT]


def test_what_was_learnt_is_contributed_once() -> None:
    replica = Replica()
    replica.learn(3)
    given = replica.merging._take(DEFAULT, 1)
    assert given is not None
    assert given.images == replica.tenant.adapter.totals.selected
    again = replica.merging._take(DEFAULT, 1)
    assert again is not None
    assert again.images == 0
    assert replica.merging._take(DEFAULT, 7) is None  # learnt from another start
    assert replica.merging._take("unknown", 1) is None


def test_learning_goes_on_while_the_merge_is_made() -> None:
    replica = Replica()
    replica.learn(2)
    given = replica.merging._take(DEFAULT, 1)
    assert given is not None
    replica.learn()  # meanwhile
    now = replica.tenant.adapter.state_dict()
    merged = {k: v + 0.5 if k.startswith("param.") else v for k, v in given.state.items()}
    replica.merging._adopt(DEFAULT, 2, merged, False)
    after = replica.tenant.adapter.state_dict()
    for key, value in now.items():
        if key.startswith("param."):
            assert torch.allclose(after[key], value + 0.5, atol=1e-6), key
    assert replica.tenant.adapter.steps == 3
    last = replica.merging._take(DEFAULT, 2)
    assert last is not None
    assert last.images > 0  # what was learnt meanwhile counts in the next merge


def test_a_guard_that_took_learning_back_keeps_it_out_of_the_merge() -> None:
    replica = Replica(guarded=True)
    replica.learn(2)
    replica.tenant.answering.recovery.trouble(False)  # type: ignore[attr-defined]
    replica.learn()
    assert replica.merging._take(DEFAULT, 1) is None
    before = replica.tenant.adapter.state_dict()
    merged = {k: v + 1 if k.startswith("param.") else v for k, v in before.items()}
    replica.merging._adopt(DEFAULT, 2, merged, False)  # and does not follow the others yet
    assert replica.merging._progress[DEFAULT].version == STALE
    key = next(k for k in before if k.startswith("param."))
    assert torch.equal(replica.tenant.adapter.state_dict()[key], before[key])
    replica.tenant.answering.recovery.mode = "adapt"  # type: ignore[attr-defined]
    replica.merging._adopt(DEFAULT, 3, merged, False)
    assert torch.equal(replica.tenant.adapter.state_dict()[key], merged[key])


def test_an_admins_state_is_taken_whatever_the_guard_says() -> None:
    replica = Replica(guarded=True)
    replica.learn(2)
    replica.tenant.answering.recovery.trouble(False)  # type: ignore[attr-defined]
    initial = replica.merging.introduction()["initial"]
    replica.merging._adopt(DEFAULT, 9, initial, True)
    assert replica.tenant.answering.mode == "adapt"  # type: ignore[attr-defined]
    assert replica.tenant.answering.steps == 0
    assert replica.merging._progress[DEFAULT].version == 9


def test_a_stream_that_makes_room_hands_over_what_it_learnt() -> None:
    replica = Replica()
    replica.learn(2)
    replica.service.tenants.on_evict(replica.tenant)
    ((stream, version, given),) = replica.keeper.left
    assert (stream, version) == (DEFAULT, 1)
    assert given.images > 0


def test_without_the_keeper_a_new_stream_is_refused_and_later_accepted() -> None:
    replica = Replica()
    answer, replica.keeper.answer = replica.keeper.answer, None
    with pytest.raises(Refusal) as refused:
        replica.service.tenants.get("new")
    assert refused.value.status == 503
    assert refused.value.retry_after
    replica.keeper.answer = answer
    assert replica.service.tenants.get("new").name == "new"


# --- the keeper ---------------------------------------------------------------------------------


class Handle:
    """Ray Serve's handle to all replicas."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.dead: set[int] = set()

    def broadcast(self, method: str, *args: Any) -> Any:
        return _Broadcast([self._one(n, method, args) for n in range(len(self.replicas))])

    def _one(self, number: int, method: str, args: tuple[Any, ...]) -> Any:
        if number in self.dead:
            return RuntimeError("dead")
        merging = self.replicas[number].merging
        if method == "contribute":
            return merging._take(*args)
        if method == "adopt":
            return merging._adopt(*args, *([False] if len(args) == 3 else []))
        assert method == "introduction"
        return {**merging.introduction(), "paused_all": False, "paused": ["p"]}


class _Broadcast:
    def __init__(self, replies: list[Any]) -> None:
        self._replies = replies

    async def results_async(self, **options: Any) -> list[Any]:
        return self._replies


def keeper_of(replicas: list[Replica], folder: Path | None, every: int = 1000) -> Keeper:
    keeper = Keeper("app", folder, keep=3, every=every)
    keeper._handle = Handle(replicas)
    return keeper


async def introduced(replicas: list[Replica], folder: Path | None, **options: Any) -> Keeper:
    keeper = keeper_of(replicas, folder, **options)
    who = replicas[0].merging.introduction()
    await keeper.introduce(who["identity"], who["initial"], who["held"])
    for replica in replicas:
        replica.keeper.answer = await keeper.state(DEFAULT)
        assert replica.tenant.name == DEFAULT
    return keeper


def parameters(replica: Replica) -> torch.Tensor:
    state = replica.tenant.adapter.state_dict()
    return torch.cat([v.flatten() for k, v in state.items() if k.startswith("param.")])


def test_replicas_agree_after_a_merge_and_steps_add_up(tmp_path: Path) -> None:
    async def scene() -> None:
        replicas = [Replica(), Replica()]
        keeper = await introduced(replicas, tmp_path)
        replicas[1].seed = 100
        replicas[0].learn(3)
        replicas[1].learn(2)
        assert not torch.equal(*map(parameters, replicas))
        await keeper._merge(DEFAULT)
        assert torch.equal(*map(parameters, replicas))
        assert [r.tenant.adapter.steps for r in replicas] == [5, 5]
        saved = await keeper.snapshot(DEFAULT)
        assert saved == {"step": 5, "snapshot": 1}
        replicas[0].learn(1)
        assert (await keeper.rollback(DEFAULT, None)) == {"step": 5, "snapshot": 1}
        assert [r.tenant.adapter.steps for r in replicas] == [5, 5]
        assert (await keeper.rollback(DEFAULT, 99)) is None
        assert (await keeper.reset(DEFAULT))["step"] == 0
        assert [r.tenant.adapter.steps for r in replicas] == [0, 0]
        assert (await keeper.facts(DEFAULT))["snapshots"] == [2, 1]

    asyncio.run(scene())


def test_a_new_keeper_continues_from_the_snapshot_of_the_old_one(tmp_path: Path) -> None:
    async def scene() -> None:
        replicas = [Replica()]
        keeper = await introduced(replicas, tmp_path)
        replicas[0].learn(3)
        assert await keeper.finish()
        learnt = parameters(replicas[0])
        fresh = [Replica()]
        again = await introduced(fresh, tmp_path)
        assert fresh[0].tenant.adapter.steps == 3
        assert torch.equal(parameters(fresh[0]), learnt)
        assert await again.finish()
        file = next(tmp_path.rglob("*-*.safetensors"))
        file.write_bytes(file.read_bytes()[:-9])  # a damaged one is passed over
        last = [Replica()]
        await introduced(last, tmp_path)
        assert last[0].tenant.adapter.steps == 0

    asyncio.run(scene())


def test_a_keeper_that_was_restarted_asks_the_replicas() -> None:
    async def scene() -> None:
        replicas = [Replica(), Replica()]
        keeper = await introduced(replicas, None)
        replicas[0].learn(3)
        await keeper._merge(DEFAULT)
        replicas[1].learn(2)
        restarted = keeper_of(replicas, None)  # knows nothing
        merged = await restarted._merge(DEFAULT)
        assert merged.steps == 5
        assert merged.version == 2
        assert (await restarted.pauses())["streams"] == ["p"]
        assert [r.tenant.adapter.steps for r in replicas] == [5, 5]

    asyncio.run(scene())


def test_a_dead_replica_does_not_stop_the_merge() -> None:
    async def scene() -> None:
        replicas = [Replica(), Replica()]
        keeper = await introduced(replicas, None)
        replicas[0].learn(2)
        replicas[1].learn(2)
        keeper._handle.dead = {1}
        assert (await keeper._merge(DEFAULT)).steps == 2
        assert replicas[0].tenant.adapter.steps == 2

    asyncio.run(scene())


def test_a_disk_that_is_full_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        replicas = [Replica()]
        keeper = await introduced(replicas, tmp_path)
        replicas[0].learn(2)

        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("moetta.serve.ray_keeper.write_atomically", full)
        with pytest.raises(OSError, match="No space left"):
            await keeper.snapshot(DEFAULT)
        assert not await keeper.finish()
        monkeypatch.undo()
        replicas[0].learn(1)
        assert await keeper.finish()

    asyncio.run(scene())


def test_replicas_of_another_model_are_refused() -> None:
    async def scene() -> None:
        keeper = await introduced([Replica()], None)
        other = identity(moetta.adapt(small_vit(), "tent"))
        with pytest.raises(ValueError, match="replicas differ"):
            await keeper.introduce(other, {}, {})

    asyncio.run(scene())
