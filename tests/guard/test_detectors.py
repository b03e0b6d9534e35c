"""The detectors: known sequences, delays, and false-alarm rates by simulation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moetta.guard.detectors import (
    LARGEST,
    MEMORY,
    REFERENCES,
    Frequencies,
    MeanDetector,
    RateDetector,
    cusum_threshold,
)


@pytest.mark.parametrize(
    ("reference", "interval", "threshold"),
    # Mean intervals of one-sided CUSUM charts as textbooks list them.
    [(0.5, 336, 4.0), (0.5, 930, 5.0), (0.25, 734, 8.0)],
)
def test_the_threshold_is_the_textbooks(reference: float, interval: float, threshold: float):
    assert cusum_threshold(reference, interval) == pytest.approx(threshold, abs=0.05)


@given(st.floats(10, 1e8), st.floats(1.01, 10))
def test_a_longer_interval_needs_a_higher_threshold(interval: float, factor: float):
    for reference in REFERENCES:
        low, high = (cusum_threshold(reference, n) for n in (interval, factor * interval))
        assert low < high


def run_length(detector: MeanDetector, values: list[float], floor: float = 0.3) -> int:
    for number, value in enumerate(values, 1):
        detector.update(value, floor)
        if detector.level >= 1:
            return number
    return len(values) + 1


def test_a_known_sequence():
    detector = MeanDetector(interval=100)
    for value in (50.0, -20.0, 100.0):  # the deviation stays at the floor
        detector.update(value, 100.0)
    assert detector.sums == pytest.approx([0.375 - 0.325 + 0.875, 0.5])
    detector.update(-1000.0, 100.0)  # cut off at four deviations
    assert detector.sums == [0.0, 0.0]
    assert detector.level == 0


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0, 10.0])
def test_mean_detector_keeps_its_interval(scale: float):
    """In control, the mean time to a false alarm is what was asked for, or longer."""
    generator = torch.Generator().manual_seed(0)
    lengths = []
    for _ in range(60):
        values = (scale * torch.randn(2000, generator=generator, dtype=torch.float64)).tolist()
        lengths.append(run_length(MeanDetector(interval=300), values, 1.0))
    assert sum(lengths) / len(lengths) >= 0.8 * 300  # the deviation is estimated, not known


@pytest.mark.parametrize(("shift", "most"), [(0.25, 260), (0.5, 90), (1.0, 35), (4.0, 8)])
def test_mean_detector_finds_a_shift_in_time(shift: float, most: int):
    """The default interval; a shift in standard deviations per look, after 100 looks of calm."""
    generator = torch.Generator().manual_seed(1)
    delays = []
    for _ in range(20):
        detector = MeanDetector(interval=30_000)
        for value in torch.randn(100, generator=generator).tolist():
            detector.update(value, 0.3)
        values = (shift + torch.randn(2000, generator=generator)).tolist()
        delays.append(run_length(detector, values))
    assert sum(delays) / len(delays) <= most


def test_no_single_look_decides():
    detector = MeanDetector(interval=30_000)
    detector.update(1e9, 0.01)
    assert 0 < detector.level < 1
    assert detector.sums[0] == LARGEST - REFERENCES[0]


def test_rate_detector_keeps_its_interval():
    """At the highest rate that is in order; the bound is Lorden's, in looks."""
    generator = torch.Generator().manual_seed(2)
    lengths = []
    for _ in range(40):
        detector, number = RateDetector(interval=100), 0
        while detector.level < 1 and number < 3000:
            events = float((torch.rand(16, generator=generator) < 0.4).sum())
            detector.update(events, 16, 0.4)
            number += 1
        lengths.append(number)
    assert sum(lengths) / len(lengths) >= 100


def test_rate_detector_finds_a_broken_model_at_once():
    detector = RateDetector(interval=30_000)
    for _ in range(500):
        detector.update(2, 16, 0.4)
    assert detector.level == 0
    detector.update(16, 16, 0.4)
    assert detector.level < 1
    detector.update(16, 16, 0.4)
    assert detector.level >= 1


@given(st.floats(0, 1), st.floats(0, 2))
def test_rate_detector_takes_any_rate(share: float, rate: float):
    detector = RateDetector(interval=100)
    detector.update(round(16 * share), 16, rate)
    assert math.isfinite(detector.sum)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40), st.integers(0, 39))
def test_detectors_resume_exactly(values: list[float], cut: int):
    whole, first = MeanDetector(100), MeanDetector(100)
    for value in values:
        whole.update(value, 0.1)
    for value in values[:cut]:
        first.update(value, 0.1)
    second = MeanDetector(100)
    second.restore(first.state())
    for value in values[cut:]:
        second.update(value, 0.1)
    assert second.state() == whole.state()


def fill(frequencies: Frequencies, source: torch.Tensor, adapted: torch.Tensor) -> None:
    for _ in range(10 * MEMORY):
        frequencies.add(source, adapted)


def test_concentration_is_the_difference_of_the_entropies():
    frequencies = Frequencies(4)
    source = torch.tensor([0, 1, 2, 3] * 4)
    adapted = torch.tensor([0, 0, 2, 2] * 4)
    fill(frequencies, source, adapted)
    found = frequencies.concentration(source, adapted)
    assert found == pytest.approx(math.log(4) - math.log(2), abs=0.01)
    assert frequencies.concentration(source, source) < found


@given(st.lists(st.integers(0, 4), min_size=16, max_size=16))
def test_the_same_predictions_show_no_concentration(predictions: list[int]):
    """Whatever the traffic: one class, bursts, a new domain."""
    frequencies, same = Frequencies(5), torch.tensor(predictions)
    frequencies.add(same, same)
    assert frequencies.concentration(same, same) == 0
