"""What tests do on each of several ranks; see `test_ranks.py`."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import moetta
from helpers.models import FAMILIES, Batch, Family, call, images, small_vit
from helpers.trials import eager, learnt
from moetta.core.adapter import Adapter
from moetta.core.functional import entropy
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import NormAffineAdapter, SGDConfig
from moetta.core.objective import Objective, Step
from moetta.nn.ranks import RankLost, RanksDiffer, even

Group = dist.ProcessGroup
SIZES = (5, 7, 1, 4)
"""Batch sizes: uneven parts, ranks without an image, and a batch that one rank has alone."""


# --- helpers --------------------------------------------------------------------------------------


def mapped(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    if isinstance(batch, dict):
        return {name: change(t) for name, t in batch.items()}
    return (change(batch[0]),)


def double(batch: Batch) -> Batch:
    return mapped(batch, lambda t: t.double() if t.is_floating_point() else t)


def part(whole: Tensor, counts: tuple[int, ...], rank: int) -> Tensor:
    start = sum(counts[:rank])
    return whole[start : start + counts[rank]]


def pair(group: Group, method: str, family: Family, **options: Any) -> tuple[Adapter, Adapter]:
    """The method in one process, and on the ranks; in float64, where rounding does not matter."""
    source: Any = None
    if moetta.list_methods()[method].needs_source:
        batches = [double(family.batch(8, seed)) for seed in (101, 102)]
        source = [b if isinstance(b, dict) else b[0] for b in batches]
    options = eager(method, **options)
    model = family.model().double()
    one = moetta.adapt(model, method, source=source, **options)
    many = moetta.adapt(model, method, source=source, process_group=group, **options)
    return one, many


def same_report(one: Adapter, many: Adapter) -> None:
    left, right = one.last, many.last
    assert left is not None
    assert right is not None
    for name in ("samples", "forwards", "backwards", "skipped"):
        assert getattr(left, name) == getattr(right, name), name
    torch.testing.assert_close(left.entropy, right.entropy, rtol=1e-5, atol=1e-5)
    assert left.losses.keys() == right.losses.keys()
    for name, value in left.losses.items():
        assert right.losses[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert (left.selected is None) == (right.selected is None)
    if left.selected is not None and right.selected is not None:
        assert torch.equal(left.selected, right.selected)
    assert left.routing.keys() == right.routing.keys()
    for name, experts in left.routing.items():
        assert torch.equal(experts, right.routing[name]), name


def same_step(
    one: Adapter, many: Adapter, group: Group, batch: Batch, counts: tuple[int, ...] | None = None
) -> None:
    """One batch in one process and spread over the ranks: the same logits and report."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    length = len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])
    counts = even(length, size) if counts is None else counts
    whole = call(one, batch)
    own = call(many, mapped(batch, lambda t: part(t, counts, rank)))
    torch.testing.assert_close(own, part(whole, counts, rank), rtol=1e-5, atol=1e-5)
    same_report(one, many)


@contextlib.contextmanager
def raises(kind: type[Exception], text: str) -> Iterator[None]:
    with pytest.raises(kind, match=text):
        yield


# --- the same as one process ----------------------------------------------------------------------


def equals_one_process(group: Group, method: str, family: str, options: dict[str, Any]) -> None:
    one, many = pair(group, method, FAMILIES[family], **options)
    size = dist.get_world_size(group)
    for seed, length in enumerate(SIZES):
        # The fourth batch is the first rank's alone.
        counts = (length, *[0] * (size - 1)) if seed == 3 else None
        batch = double(FAMILIES[family].batch(length, seed))
        same_step(one, many, group, batch, counts)
    many.check_ranks()
    assert one.totals.backwards == many.totals.backwards
    assert one.totals.selected == many.totals.selected
    for name, value in one.state_dict().items():
        theirs = many.state_dict()[name]
        torch.testing.assert_close(theirs, value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


def in_float32(group: Group, method: str) -> None:
    """As users run it: float32 and small steps."""
    options: dict[str, Any] = {"lr": 1e-3} if method != "noadapt" else {}
    model = small_vit()
    one = moetta.adapt(model, method, **options)
    many = moetta.adapt(model, method, process_group=group, **options)
    for seed in range(4):
        same_step(one, many, group, (images(6, seed),))


def selects_nothing_on_one_rank(group: Group, method: str, field: str) -> None:
    """The sure samples are all on the first rank."""
    model = small_vit().double()
    batch = images(32, 3).double()
    with torch.no_grad():
        known = entropy(model(batch))
    batch = batch[known.argsort()]
    sure = known.sort().values
    limit = float((sure[2] + sure[3]) / 2) / torch.tensor(5.0).log().item()
    options = eager(method, **{field: limit, "lr": 1e-3})
    one = moetta.adapt(model, method, **options)
    many = moetta.adapt(model, method, process_group=group, **options)
    for _ in range(2):
        same_step(one, many, group, (batch,))
        selected = many.last.selected if many.last else None
        assert selected is not None
        assert selected[:4].any()
        counts = even(32, dist.get_world_size(group))
        assert not selected[counts[0] :].any()
    assert many.totals.backwards > 0


def pauses_resets_and_resumes(group: Group, method: str) -> None:
    one, many = pair(group, method, FAMILIES["timm_vit"])
    first, second = (double(FAMILIES["timm_vit"].batch(5, seed)) for seed in (1, 2))
    same_step(one, many, group, first)
    with one.paused(), many.paused():
        same_step(one, many, group, second)
    many.snapshot()
    one.snapshot()
    same_step(one, many, group, second)
    one.rollback()
    many.rollback()
    with tempfile.TemporaryDirectory() as folder:
        many.save(Path(folder) / "state.safetensors")
        many.reset()
        many.load(Path(folder) / "state.safetensors")
    same_step(one, many, group, second)
    one.reset()
    many.reset()
    same_step(one, many, group, first)


def under_autocast(group: Group) -> None:
    model, batch, rank = small_vit(), images(6), dist.get_rank(group)
    one = moetta.adapt(model, "moetta")
    many = moetta.adapt(model, "moetta", process_group=group)
    counts = even(6, dist.get_world_size(group))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            whole, own = one(batch), many(part(batch, counts, rank))
        torch.testing.assert_close(own, part(whole, counts, rank), rtol=2e-2, atol=2e-2)


def picks_in_any_order(group: Group) -> None:
    """Positions may repeat and come in any order, and be picked from again."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    adapter = moetta.adapt(small_vit(), "tent", process_group=group)
    assert adapter.ranks is not None
    batch, counts = images(7), even(7, size)
    inputs, _ = Inputs.agreed((part(batch, counts, rank),), {}, adapter.ranks, {})
    model = small_vit()
    for index in (torch.tensor([6, 0, 3, 3, 1]), torch.tensor([2]), torch.arange(7) > 4):
        chosen = inputs.select(index)
        expected = batch[index]
        assert len(chosen) == len(expected)
        with torch.no_grad():
            torch.testing.assert_close(chosen.logits(model), model(expected))
        again = torch.arange(len(chosen)).flip(0)
        with torch.no_grad():
            torch.testing.assert_close(chosen.select(again).logits(model), model(expected.flip(0)))


# --- faults ---------------------------------------------------------------------------------------


def bad_batch_on_one_rank(group: Group) -> None:
    """Every rank refuses it, says whose it is, and goes on with the next."""
    one, many = pair(group, "moetta", FAMILIES["timm_vit"])
    rank, good = dist.get_rank(group), double(FAMILIES["timm_vit"].batch(6, 0))
    same_step(one, many, group, good)
    before = many.state_dict()
    own = part(good[0], even(6, dist.get_world_size(group)), rank)  # type: ignore[index]
    bad = {
        "NaN or infinite": own.clone().index_fill_(0, torch.tensor([0]), torch.nan),
        "uint8": own.to(torch.uint8),
        "without a tensor": None,
        "different inputs": own[:, :, :8],
    }
    for text, wrong in bad.items():
        where = "" if rank == 1 or text == "different inputs" else "rank 1: "
        with raises(ValueError, f"^{where}.*{text}"):
            many(wrong if rank == 1 else own)
    with raises(ValueError, "empty on every rank"):
        many(own[:0])
    with raises(ValueError, "rejected a batch"):
        many(own[:, :1])
    assert all(torch.equal(value, before[name]) for name, value in many.state_dict().items())
    same_step(one, many, group, good)


def huge_values_on_one_rank(group: Group) -> None:
    _, many = pair(group, "tent", FAMILIES["timm_vit"])
    own = images(2, dist.get_rank(group)).double()
    before = learnt(many)
    many(own * 1e200 if dist.get_rank(group) == 1 else own)
    assert many.last is not None
    assert many.last.skipped == "non-finite loss or gradient"
    assert all(torch.equal(value, before[name]) for name, value in learnt(many).items())
    many(own)
    assert many.last.skipped is None


def listener_fails_on_one_rank(group: Group) -> None:
    rank = dist.get_rank(group)
    for method in ("becotta", "moetta"):
        _, many = pair(group, method, FAMILIES["timm_vit"])
        heard: list[Any] = []

        def fail(logits: Tensor, heard: list[Any] = heard, many: Adapter = many) -> None:
            heard.append((logits.shape, {k: len(v) for k, v in many.routing(99).items()}))
            raise ValueError("the network is down")

        if rank == 1:
            many.on_prediction = fail
        before = many.state_dict()
        with raises(ValueError, "the network is down" if rank == 1 else "rank 1: the network is"):
            many(images(2).double())
        assert all(torch.equal(value, before[name]) for name, value in many.state_dict().items())
        if rank == 1:
            assert heard[0][0] == (2, 5)
            assert set(heard[0][1].values()) == {2 * dist.get_world_size(group)}
        many.on_prediction = None
        many(images(2).double())


def out_of_step(group: Group) -> None:
    _, many = pair(group, "tent", FAMILIES["timm_vit"])
    many(images(2).double())
    if dist.get_rank(group) == 1:
        many.reset()
    with raises(RuntimeError, "rank 0 is at step 1, rank 1 at step 0"):
        many(images(2).double())


def diverged(group: Group) -> None:
    _, many = pair(group, "eata", FAMILIES["timm_vit"])
    many(images(2).double())
    many.check_ranks()
    name, parameter = list(many.trained.items())[1]
    if dist.get_rank(group) == 1:
        with torch.no_grad():
            parameter += 1e-3
    with raises(RanksDiffer, f"{name} differs between rank 0 and rank 1"):
        many.check_ranks()


def unlike_ranks(group: Group) -> None:
    """Other configurations, models and source images are found at construction."""
    rank = dist.get_rank(group)
    with raises(ValueError, "rank 1 has another configuration"):
        moetta.adapt(small_vit(), "tent", lr=1e-3 * (1 + rank), process_group=group)
    with raises(ValueError, "rank 1 has another source model"):
        moetta.adapt(small_vit(seed=rank), "tent", process_group=group)
    with raises(RanksDiffer, "fisher.* differs"):
        moetta.adapt(small_vit(), "eata", source=images(8, rank), process_group=group)
    with raises(ValueError, "no method 'tnt'"):
        moetta.adapt(small_vit(), "tnt" if rank == 1 else "tent", process_group=group)
    model = small_vit()
    with raises(ValueError, "rank 1 has another configuration"):
        moetta.adapt(model, "tent", lr=1e-3 * (1 + rank), inplace=True, process_group=group)
    assert all(p.requires_grad for p in model.parameters())  # as it was


# --- refusals -------------------------------------------------------------------------------------


class OwnLearn(NormAffineAdapter[SGDConfig]):
    """A method from outside that steps in its own way."""

    method = "own_learn"

    def learn(self, inputs: Inputs) -> Step:
        logits = inputs.logits(self.model)
        self.descend(entropy(logits).mean())
        return Step(logits, forwards=len(inputs), backwards=len(inputs))


class ReadyLearn(OwnLearn):
    """The same; its author says that it looks at the whole batch."""

    over_ranks = True
    learn = OwnLearn.learn


class Partial(NormAffineAdapter[SGDConfig]):
    """A method from outside whose objective is this rank's part only."""

    method = "partial"

    def objective(self, inputs: Inputs) -> Objective:
        own = self.model(*inputs.args).square().mean()
        return Objective(inputs.logits(self.model), {"own": own})


class Loner(NormAffineAdapter[SGDConfig]):
    """A method from outside that calls the model itself."""

    method = "loner"

    def objective(self, inputs: Inputs) -> Objective:
        with torch.no_grad():
            return Objective(self.model(*inputs.args))


def methods_from_outside(group: Group) -> None:
    from moetta.nn.ranks import Ranks

    ranks = Ranks(group)
    with raises(ValueError, r"own_learn cannot run on several ranks: OwnLearn defines learn\(\)"):
        OwnLearn(small_vit(), SGDConfig()).spread(ranks)
    one, many = ReadyLearn(small_vit(), SGDConfig()), ReadyLearn(small_vit(), SGDConfig())
    many.spread(ranks)
    same_step(one, many, group, (images(6),))
    same_step(one, many, group, (images(6, 1),))
    rank = dist.get_rank(group)
    partial = Partial(small_vit(), SGDConfig())
    partial.spread(ranks)
    with raises(RanksDiffer, "objective must come from the whole batch"):
        partial(images(2, rank))
    loner = Loner(small_vit(), SGDConfig())
    loner.spread(ranks)
    with raises(ValueError, r"logits of 2 samples for a batch of .*inputs.logits\(\)"):
        loner(images(2, rank))


class Standardised(nn.Module):
    """Divides each image by its deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_vit()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x / x.std((1, 2, 3), keepdim=True))
        return logits


def a_row_that_counts_for_nothing_does_no_harm(group: Group) -> None:
    model = Standardised()
    one = moetta.adapt(model, "tent")
    many = moetta.adapt(model, "tent", process_group=group)
    for seed in range(2):
        same_step(one, many, group, (images(1, seed),))
        assert many.last is not None
        assert many.last.skipped is None


def silent_rank(group: Group) -> None:
    """A rank that does not answer is an error on the others, within the group's time limit."""
    impatient = dist.new_group(timeout=timedelta(seconds=3))
    many = moetta.adapt(small_vit(), "tent", process_group=impatient)
    if dist.get_rank(group) == 1:
        time.sleep(6)
    else:
        begun = time.monotonic()
        with raises(RankLost, "lost contact with another rank, which ended or did not answer"):
            many(images(2))
        assert time.monotonic() - begun < 30
    dist.barrier(group)


class NoStatistics(nn.Module):
    """A BatchNorm that always takes the batch's statistics, beside a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3, track_running_stats=False)
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.bn(x).mean((2, 3))))
        return logits


def models_that_cannot(group: Group) -> None:
    with raises(ValueError, "noadapt cannot run on several ranks: the BatchNorm 'bn'"):
        moetta.adapt(NoStatistics(), "noadapt", process_group=group)
    torch.manual_seed(0)
    model = NoStatistics()  # tent replaces the layer by one that sees the whole batch
    one = moetta.adapt(model, "tent")
    many = moetta.adapt(model, "tent", process_group=group)
    same_step(one, many, group, (images(6),))
    resnet = FAMILIES["timm_resnet"].model()
    resnet.set_grad_checkpointing(True)
    checkpointed = moetta.adapt(resnet, "tent", process_group=group)
    with raises(ValueError, "turn checkpointing off"):
        checkpointed(images(2, side=32))
    vit = small_vit()
    vit.set_grad_checkpointing(True)
    one = moetta.adapt(vit, "moetta", router_scope="model")
    many = moetta.adapt(vit, "moetta", router_scope="model", process_group=group)
    same_step(one, many, group, (images(6),))
    with raises(ValueError, "Guard cannot run on several ranks"):
        moetta.Guard(many)
    with raises(TypeError, "process_group must be a group of torch.distributed"):
        moetta.adapt(small_vit(), "tent", process_group="gloo")  # type: ignore[arg-type]
    with raises(ValueError, "adapt\\(ddp.module\\)"):
        moetta.adapt(nn.parallel.DistributedDataParallel(small_vit()), process_group=group)


# --- what is exchanged ----------------------------------------------------------------------------


def counts_bytes(group: Group) -> None:
    _, many = pair(group, "tent", FAMILIES["timm_vit"])
    assert many.ranks is not None
    many.ranks.sent.clear()
    many.ranks.calls.clear()
    many(images(2).double())
    numbers = sum(p.numel() for p in many.trained.values())
    assert many.ranks.sent["gradients"] == 8 * (numbers + 2)  # and the loss
    assert many.ranks.sent["rows"] == 8 * 2 * 5
    assert many.ranks.calls == {"gradients": 1, "rows": 1, "control": 3}
    assert many.ranks.sent["control"] == 3 * 512


def one_member(group: Group) -> None:
    """A group of one is a process by itself; others are not members."""
    ours = dist.new_group([0])
    if dist.get_rank(group) == 0:
        adapter = moetta.adapt(small_vit(), "tent", process_group=ours)
        assert adapter.ranks is None
        assert adapter(images(2)).shape == (2, 5)
    else:
        with raises((TypeError, ValueError), "member|must be a group"):  # type: ignore[arg-type]
            moetta.adapt(small_vit(), "tent", process_group=ours)  # type: ignore[arg-type]
