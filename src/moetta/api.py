"""The front door: one function."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from moetta.core.adapter import Adapter, Source
from moetta.core.config import Config
from moetta.methods import find, of_config
from moetta.nn.ranks import Ranks


def adapt(
    model: nn.Module,
    method: str | Config = "moetta",
    *,
    preset: str = "paper",
    source: Source = None,
    inplace: bool = False,
    process_group: ProcessGroup | None = None,
    **config: Any,
) -> Adapter:
    """Wrap a classifier so that it learns from the images it classifies.

    Args:
        model: any classifier with LayerNorm, GroupNorm or BatchNorm layers that returns logits, or
            an object with ``.logits``.
        method: a method's name (`moetta.list_methods()` lists them), ``"package.module:Class"`` for
            a method of yours, or a configuration object.
        preset: the settings to start from: "paper", "released" (what the authors' code does), or
            another preset of the method. Only with a name.
        source: source images, for the methods that need them: a tensor, an iterable of batches, or
            the path of a file written by ``adapter.save_source``.
        inplace: adapt this very object; ``adapter.unwrap()`` undoes it. Otherwise the object is
            left alone, and the memory of its frozen weights is shared, not copied.
        process_group: the processes (of `torch.distributed`) that share every batch. Each of them
            makes the same adapter and calls it with its part of the batch; together they compute
            what one process would. None: this process works by itself.
        **config: fields of the method's configuration. Only with a name.

    Returns:
        The adapter; call it as you would call the model.

    Raises:
        ValueError: an unknown method, preset or field (the message names the nearest), missing
            source images, or a model without layers that the method can train. On several ranks
            also: a method or model that cannot be used there, or an error on another rank.
    """
    if process_group is None:
        return _made(model, method, preset, source, inplace, config)
    ranks = _ranks(process_group)
    with ranks.together():
        if isinstance(model, DistributedDataParallel):
            raise ValueError("pass the model inside DistributedDataParallel: adapt(ddp.module)")
        adapter = _made(model, method, preset, source, inplace, config)
    if ranks.size > 1:
        try:
            adapter.spread(ranks)
        except BaseException:
            adapter.unwrap()  # a refused inplace=True must leave the user's model as it was
            raise
    return adapter


def _ranks(group: Any) -> Ranks:
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "process_group must be a group of torch.distributed (after init_process_group() that "
            f"is torch.distributed.group.WORLD), not {type(group).__name__}"
        )
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not a member of process_group")
    return Ranks(group)


def _made(
    model: nn.Module,
    method: str | Config,
    preset: str,
    source: Source,
    inplace: bool,
    config: dict[str, Any],
) -> Adapter:
    if isinstance(method, Config):
        if config or preset != "paper":
            raise ValueError(
                "pass fields and preset with a method's name, not with a config object"
            )
        found, settings = of_config(method), method
    else:
        found = find(method)
        settings = found.config.preset(preset, **config)
    return found.adapter(model, settings, source, inplace)
