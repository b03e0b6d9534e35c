"""Common ground of all tests: one thread and fixed seeds, so that runs agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "moetta",
    deadline=None,  # the first example pays for imports and warm-up
    derandomize=True,  # the same examples on every run
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("moetta")


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
