"""What every corruption is given, and how its result becomes bytes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moetta.data.corruptions.constants import Preset
from moetta.data.corruptions.rng import Streams


@dataclass(frozen=True)
class Job:
    """One corruption at one severity for some samples: its settings and its random streams."""

    setting: Any
    streams: Streams
    preset: Preset
    frost_folder: Path | None = None


def to_bytes(levels: Tensor) -> Tensor:
    """Float levels (0 .. 255, a scratch tensor) to uint8, cut to the range and truncated.

    The original truncates. A value that is a whole number in exact arithmetic must not fall to the
    one below by rounding in its last bit, which would differ between devices: hence the small lift.
    """
    return levels.add_(1e-3).clamp_(0, 255).to(torch.uint8)
