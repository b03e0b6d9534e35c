"""Learning steps of which only a part is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from moetta.core.adapter import Adapter


@contextmanager
def shortened(adapter: Adapter, share: Callable[[], float]) -> Iterator[None]:
    """Keep only a share of the step that is made within the block; with SGD, a lower learning rate.

    Args:
        adapter: what learns.
        share: called after the step, so that it may depend on what was seen before the update. If
            it is 0, everything is as before the step, momentum and running means included.
    """
    state = adapter.state_dict()
    before = [p.detach().clone() for p in adapter.trained.values()]
    yield
    kept = share()
    if kept == 0:
        adapter.load_state_dict(state)
    elif kept < 1:
        with torch.no_grad():
            for parameter, start in zip(adapter.trained.values(), before, strict=True):
                parameter.copy_(torch.lerp(start, parameter, kept))
