"""RDumb: ETA that starts over every thousand batches (Press et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from moetta.methods.eata import EATA, EATAConfig
from moetta.methods.registry import Citation, Drawn, register


@dataclass(frozen=True)
class RDumbConfig(EATAConfig):
    """ETA (EATA without Fisher weights) with a fixed reset interval."""

    lr: float = 2.5e-4
    fisher_weight: float = 0.0
    reset: int | str | None = 1000


@register(
    "rdumb",
    RDumbConfig,
    title="RDumb",
    summary="ETA that returns to the source model every thousand batches",
    group="resets",
    citation=Citation(
        "Press, Ori and Schneider, Steffen and Kümmerer, Matthias and Bethge, Matthias",
        "RDumb: A simple approach that questions our progress in continual test-time adaptation",
        "NeurIPS",
        2023,
    ),
    drawn=Drawn("#374151", "#9ca3af", "H", "--"),
    cost="1 forward, at most 1 backward",
)
class RDumb(EATA):
    """EATA with RDumb's settings."""
