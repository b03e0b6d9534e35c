"""Small batches whose answers depend on their batch-mates: they are answered in company.

BatchNorm layers that take the batch's statistics answer one image alone quite differently from the
same image among others, and mostly worse than the source model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moetta.core.adapter import Adapter

NEGLIGIBLE = 0.01
"""Share of the largest logit that rounding, or a little coupling, may change."""
PROBE = 4
RANKS = 3


def needs_company(adapter: Adapter, source: Callable[[Tensor], Tensor], like: Tensor) -> bool:
    """Whether an image alone is answered otherwise than among others, and than by the source model.

    Found by trying. LAME, for instance, has nothing to smooth in a single image, whose classes it
    ranks as the source model does: that needs no company.

    Args:
        adapter: what answers, before it has learnt anything; it learns nothing from this.
        source: the source model.
        like: a batch of the right size and device.
    """
    noise = torch.Generator().manual_seed(0)
    images = torch.randn((PROBE, *like.shape[1:]), generator=noise).to(like)
    with adapter.paused():
        together = adapter(images)
        alone = torch.cat([adapter(image[None]) for image in images])
    if bool((together - alone).abs().max() <= NEGLIGIBLE * alone.abs().max()):
        return False
    return not torch.equal(_ranked(alone), _ranked(source(images)))


def _ranked(logits: Tensor) -> Tensor:
    return logits.topk(min(RANKS, logits.shape[1])).indices


def with_company(images: Tensor, company: Tensor | None, size: int) -> Tensor | None:
    """A batch with so many of the tenant's latest images behind it that they are ``size``.

    None if there are not enough of them yet.
    """
    missing = size - len(images)
    if missing <= 0:
        return images
    if company is None or len(company) < missing:
        return None
    return torch.cat([images, company[-missing:]])


def latest(company: Tensor | None, images: Tensor, size: int) -> Tensor:
    """The last ``size`` images, these included."""
    return (images if company is None else torch.cat([company, images]))[-size:].clone()
