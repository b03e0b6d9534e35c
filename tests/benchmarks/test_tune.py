"""The rule by which benchmarks/tune.py chooses learning rates."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moetta import zoo

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tune() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune", ROOT / "benchmarks" / "tune.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tune"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


NONE = {seed: {"accuracy": 70.0, "quarters": [70.0] * 4} for seed in (42, 4242, 424242)}


def settle(
    tune: ModuleType,
    accuracy: dict[float, float],
    last: dict[tuple[float, int], float],
    **more: Any,
) -> tuple[Any, list[tuple[float, int]]]:
    """The choice, and the trials it asked for; ``last`` are last quarters that differ."""
    tried: dict[tuple[float, int], dict[str, Any]] = more.get("tried", {})
    asked = []
    while True:
        try:
            return tune.choose(tried, NONE), asked
        except tune.Missing as missing:
            key = (missing.lr, missing.seed)
            assert key not in asked
            asked.append(key)
            value = accuracy[missing.lr]
            tried[key] = {"accuracy": value, "quarters": [value] * 3 + [last.get(key, value)]}


def test_the_best_rate_with_a_margin_to_harm_wins(tune: ModuleType) -> None:
    accuracy = {1e-3: 71.0, 3e-3: 72.0, 1e-2: 73.0, 3e-2: 74.0, 0.1: 60.0}
    choice, asked = settle(tune, accuracy, {})
    assert choice.lr == 1e-2  # 3e-2 is better, but the next higher rate harms
    assert choice.passed
    assert choice.gains == (3.0, 3.0, 3.0)
    assert len(asked) == 5 + 2 * 2  # the screening, and two more seeds for two rates


def test_rates_above_a_hopeless_one_are_not_tried(tune: ModuleType) -> None:
    choice, asked = settle(tune, {1e-3: 71.0, 3e-3: 70.5, 1e-2: 68.0}, {})
    assert choice.lr == 1e-3
    assert max(lr for lr, _ in asked) == 1e-2


def test_a_rate_far_below_noadapt_is_climbed_over_while_accuracy_rises(tune: ModuleType) -> None:
    """As with BatchNorm, where the statistics of a batch alone cost more than a point."""
    accuracy = {1e-4: 67.0, 3e-4: 67.1, 1e-3: 68.0, 3e-3: 68.5, 1e-2: 71.0, 3e-2: 72.0, 0.1: 60.0}
    choice, asked = settle(tune, accuracy, {})
    assert [lr for lr, _ in asked[:6]] == [1e-3, 3e-4, 3e-3, 1e-2, 3e-2, 0.1]
    assert choice.lr == 1e-2
    choice, asked = settle(tune, {**accuracy, 3e-3: 68.0}, {})  # no better than 1e-3
    assert (choice.lr, choice.passed) == (1e-4, False)
    assert max(lr for lr, _ in asked) == 3e-3


def test_a_last_quarter_below_noadapt_drops_a_rate_and_its_lower_neighbour(
    tune: ModuleType,
) -> None:
    accuracy = {1e-3: 71.0, 3e-3: 72.0, 1e-2: 73.0, 3e-2: 74.0, 0.1: 75.0}
    choice, _ = settle(tune, accuracy, {(3e-2, 42): 69.9})
    assert choice.lr == 3e-3
    choice, _ = settle(tune, accuracy, {(3e-2, 4242): 69.9})  # another seed: only that rate
    assert choice.lr == 1e-2


def test_spread_over_seeds_counts_against_a_rate(tune: ModuleType) -> None:
    def trial(accuracy: float) -> dict[str, Any]:
        return {"accuracy": accuracy, "quarters": [accuracy] * 4}

    tried = {(1e-2, s): trial(a) for s, a in zip(NONE, (73.0, 71.0, 75.0), strict=True)}
    tried |= {(3e-3, s): trial(72.0) for s in NONE}
    tried |= {(1e-3, 42): trial(71.0), (3e-2, 42): trial(70.0), (0.1, 42): trial(50.0)}
    assert tune.choose(tried, NONE).lr == 3e-3  # 2.0 - 0.0 against 3.0 - 2.0


def test_without_a_rate_that_passes_the_lowest_is_taken_and_marked(tune: ModuleType) -> None:
    accuracy = {1e-4: 70.0, 3e-4: 70.0, 1e-3: 69.9, 3e-3: 60.0}
    choice, _ = settle(tune, accuracy, {})
    assert (choice.lr, choice.passed) == (1e-4, True)  # 3e-4 does no harm either
    choice, _ = settle(tune, {**accuracy, 3e-4: 69.9}, {})
    assert (choice.lr, choice.passed) == (1e-4, False)
    assert "no rate passed" in str(choice)


def test_older_trials_rule_rates_out_but_do_not_decide(tune: ModuleType) -> None:
    old = {
        (lr, 42): {"accuracy": a} for lr, a in zip(tune.RATES, (71, 72, 60, 60, 60), strict=True)
    }
    choice, asked = settle(tune, {1e-3: 71.0, 3e-3: 72.0}, {}, tried=old)
    assert choice.lr == 1e-3
    assert {lr for lr, _ in asked} == {1e-3, 3e-3}


def test_what_is_on_file_decides_what_is_shipped(tune: ModuleType, tmp_path: Path) -> None:
    """The settings of all shipped models are what the trials give."""
    toml = tmp_path / "tuned.toml"
    shipped = ROOT / "src" / "moetta" / "zoo" / "tuned.toml"
    toml.write_text(shipped.read_text())
    tune.main(tune.Tune(search=False, toml=toml))
    assert toml.read_text() == shipped.read_text()
    tune.main(tune.Tune(search=False, toml=toml, models=("digits-vit",)))
    assert toml.read_text() == shipped.read_text()  # other models keep their notes too


def test_a_trial_records_quarters_and_undecided_settings_stay(
    tune: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tune.LIMIT, "digits", 128)
    trials, toml = tmp_path / "trials.jsonl", tmp_path / "tuned.toml"
    toml.write_text("[digits-vit.tent]\nlr = 0.5\n[digits-vit.sar]\nlr = 0.25\n")
    options = tune.Tune(models=("digits-vit",), methods=("tent",), trials=trials, toml=toml)
    tune.main(options)
    lines = [json.loads(line) for line in trials.read_text().splitlines()]
    assert {line["seed"] for line in lines if line["method"] == "noadapt"} == set(tune.SEEDS)
    assert all(line["samples"] == 128 and len(line["quarters"]) == 4 for line in lines)
    assert all(line["weights"] == zoo.card("digits-vit")["sha256"][:12] for line in lines)
    found = tomllib.loads(toml.read_text())["digits-vit"]
    assert found["sar"] == {"lr": 0.25}
    assert found["tent"]["lr"] in (*tune.RATES, *tune.LOWER)
    size = len(lines)
    tune.main(options)  # nothing is run twice
    assert len(trials.read_text().splitlines()) == size
