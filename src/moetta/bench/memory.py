"""Peak memory of a run."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

import torch


def reset_peak(device: str) -> None:
    """Start a new measurement."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # on Linux, forget the peak so far
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: str) -> int:
    """Bytes used by the GPU's tensors, or else by the whole process."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
