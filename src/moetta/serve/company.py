"""Small batches whose answers depend on their batch-mates: they are answered in company.

BatchNorm layers that take the batch's statistics, LAME and others answer one image alone quite
differently from the same image among others, and mostly worse than the source model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moetta.core.adapter import Adapter

NEGLIGIBLE = 0.01
"""Share of the largest logit that rounding, or a little coupling, may change."""
PROBE = 4


def depends_on_company(adapter: Adapter, like: Tensor) -> bool:
    """Whether an image's logits change with the other images of its batch; found by trying.

    Args:
        adapter: what answers; it learns nothing from this.
        like: a batch of the right size and device.
    """
    noise = torch.Generator().manual_seed(0)
    images = torch.randn((PROBE, *like.shape[1:]), generator=noise).to(like)
    with adapter.paused():
        together = adapter(images)
        alone = torch.cat([adapter(image[None]) for image in images])
    return bool((together - alone).abs().max() > NEGLIGIBLE * alone.abs().max())


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
