"""Stop and go on: a state saved by one process continues, bit for bit, in another."""

import tempfile
from pathlib import Path

import timm
import torch

import moetta


def start() -> moetta.Adapter:
    """What each process does first."""
    torch.manual_seed(0)
    return moetta.adapt(timm.create_model("test_vit", num_classes=10), "moetta")


batches = torch.randn(4, 8, 3, 160, 160, generator=torch.Generator().manual_seed(1))
path = Path(tempfile.mkdtemp()) / "adapted.safetensors"

first = start()
first(batches[0])
first(batches[1])
first.save(path)
expected = first(batches[2])

second = start()
second.load(path)
assert torch.equal(second(batches[2]), expected)
print("the restarted adapter predicts the same, bit for bit")

second.reset()
assert second.totals.samples == 0
print("after reset() it is the source model again")
