"""Metrics that alerts rely on exist before anything has happened."""

from __future__ import annotations

import re
from pathlib import Path

from moetta.serve.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs" / "serve.md"


def test_every_metric_that_the_docs_name_is_there_from_the_start() -> None:
    text = Metrics().text().decode()
    named = set(re.findall(r"moetta_[a-z_]+[a-z]", DOCS.read_text()))
    there = set(re.findall(r"^(moetta_[a-z_]+)", text, re.MULTILINE))
    assert len(named) > 5
    assert named <= there


def test_the_series_of_the_four_alerts_start_at_zero() -> None:
    text = Metrics().text().decode()
    alerts = re.findall(r"- alert: (\w+)", DOCS.read_text())
    assert alerts == ["GuardActs", "Refusing", "NotSaving", "NotLearning"]
    found = re.findall(r'(moetta_\w+)\{(\w+)=(~?)"([^"]+)"\}', DOCS.read_text())
    assert len(found) >= 4
    for metric, label, pattern, value in found:
        for one in value.split("|") if pattern else [value]:
            assert f'{metric}{{{label}="{one}"}} 0.0' in text
