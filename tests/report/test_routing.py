from __future__ import annotations

import numpy as np
import pytest

from moetta.report.routing import Routing


def bits(counts: np.ndarray) -> float:
    domains = [str(i) for i in range(counts.shape[0])]
    return float(Routing(["layer"], domains, counts[None]).information()[0])


def test_a_domain_that_decides_the_expert_tells_all_of_it() -> None:
    assert bits(np.eye(4) * 1_000_000) == pytest.approx(2.0, abs=1e-4)


def test_routing_that_ignores_the_domain_tells_nothing_even_on_a_short_stream() -> None:
    rng = np.random.default_rng(0)
    noise = [bits(rng.multinomial(40, np.full(9, 1 / 9), size=15).astype(float)) for _ in range(50)]
    # Uncorrected, chance alone would tell 0.13 bits here.
    assert np.mean(noise) < 0.015


def test_a_layer_that_routed_nothing_tells_nothing() -> None:
    assert bits(np.zeros((3, 2))) == 0
