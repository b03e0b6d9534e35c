"""What each corruption gets as input, and how its result becomes bytes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moetta.data.corruptions.constants import Preset
from moetta.data.corruptions.rng import Streams


@dataclass(frozen=True)
class Job:
    """One corruption at one severity for some images: its settings and its random streams."""

    setting: Any
    streams: Streams
    preset: Preset
    frost_folder: Path | None = None


def to_bytes(levels: Tensor) -> Tensor:
    """Clamps float levels to 0 .. 255 and truncates them to uint8; overwrites its input.

    The original truncates. The small offset keeps values that are whole numbers in exact arithmetic
    from dropping to the next lower one by a rounding error, which differs between devices.
    """
    return levels.add_(1e-3).clamp_(0, 255).to(torch.uint8)
