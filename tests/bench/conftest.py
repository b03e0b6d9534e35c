"""One Ray for all tests of the benchmark that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray_clusters import cluster


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """The address of a Ray cluster with two CPUs."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch, cluster() as found:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        yield found.address
        ray.shutdown()
