"""An adapter on several ranks: whether it may, whether they are alike, and what one call means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moetta.core.inputs import Inputs
from moetta.nn.norms import own_statistics
from moetta.nn.ranks import Ranks

if TYPE_CHECKING:
    from moetta.core.adapter import Adapter


def why_not(adapter: Adapter) -> str | None:
    """Why this adapter cannot share a batch with other ranks, or None."""
    if why := adapter.steps_alone():
        return why
    if alone := own_statistics(adapter.network):
        return (
            f"the BatchNorm {alone!r} has no source statistics; each rank would normalise by "
            "those of its part"
        )
    return None


def check_alike(adapter: Adapter, ranks: Ranks) -> None:
    """Refuse ranks that cannot work together; all of them have to call this.

    Raises:
        ValueError: one cannot share a batch, or has another method, configuration or source model.
    """
    with ranks.together():
        if why := why_not(adapter):
            raise ValueError(f"{adapter.method} cannot run on several ranks: {why}")
    ours = {
        "method": adapter.method,
        "configuration": adapter.config.to_dict(),
        "source model": adapter.fingerprint(),
    }
    told = ranks.tell(ours)
    for rank, theirs in enumerate(told):
        for what in ours:
            if theirs[what] != told[0][what]:
                raise ValueError(
                    f"rank {rank} has another {what} than rank 0: {theirs[what]}, not "
                    f"{told[0][what]}"
                )


def compare(adapter: Adapter, ranks: Ranks) -> None:
    """Check that all ranks are in the same state; all of them have to call this.

    Raises:
        RanksDiffer: they are not; names the first tensor that differs.
    """
    tensors: dict[str, Tensor] = {**adapter.trained}
    tensors |= {name: t for name, t in adapter.running.items() if t is not None}
    tensors["steps"] = torch.tensor(float(adapter.steps))
    ranks.compare(tensors)


def agreed(
    adapter: Adapter, ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any], paused: bool
) -> tuple[Inputs, bool]:
    """This rank's rows, once all ranks have found theirs usable and mean the same step.

    Returns:
        The rows, and whether any rank has someone who listens to predictions.
    """
    facts = {"steps": adapter.steps, "paused": paused}
    listening = {"listening": adapter.on_prediction is not None}
    inputs, told = Inputs.agreed(args, kwargs, ranks, facts | listening)
    for rank, fact in enumerate(told):
        if any(fact[name] != told[0][name] for name in facts):
            was = [f"step {f['steps']}{', paused' * f['paused']}" for f in told]
            raise RuntimeError(
                f"rank 0 is at {was[0]}, rank {rank} at {was[rank]}: call the adapter, its "
                "reset(), load(), rollback() and paused() on every rank alike"
            )
    return inputs, any(fact["listening"] for fact in told)
