from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moetta
from moetta.core.config import Config
from moetta.suggest import nearest

METHODS = moetta.list_methods()

# The hyper-parameters of the paper, and where the released code differs.
PAPER = {
    "noadapt": {},
    "tent": {"lr": 5e-4, "momentum": 0.9},
    "eata": {"lr": 6e-4, "momentum": 0.9, "e0": 0.4, "margin": 0.05, "fisher_weight": 2000},
    "cotta": {"lr": 1e-3, "momentum": 0.9, "threshold": 0.1, "augmentations": 32},
    "sar": {"lr": 5e-4, "momentum": 0.9, "e0": 0.4, "rho": 0.05, "recover_below": 0.2},
    "deyo": {"lr": 5e-5, "momentum": 0.9, "filter_e0": 0.5, "e0": 0.4, "plpd": 0.2},
    "mgtta": {"lr": 3e-4},
    "becotta": {"lr": 1e-5, "e0": 0.4},
    "moetta": {"lr": 1e-3, "momentum": 0.9, "experts": 9, "balance": 0.2, "e0": 0.4},
}
RELEASED = {
    "sar": {"second": "batch", "predict": "perturbed"},
    "deyo": {"filter_e0": 0.4, "e0": 0.5, "plpd": 0.5},
    "moetta": {"threshold": "aliased", "batch_balance": "constant"},
    "roid": {"prior": "logits"},
    "rem": {"hidden": (0.1, 0.2)},
}


@pytest.mark.parametrize("method", PAPER)
def test_the_defaults_are_the_papers(method: str) -> None:
    config = METHODS[method].config()
    assert config == METHODS[method].config.preset("paper")
    for name, value in PAPER[method].items():
        assert getattr(config, name) == value, name


@pytest.mark.parametrize("method", METHODS)
def test_the_released_preset_differs_where_the_code_does(method: str) -> None:
    paper, released = (METHODS[method].config.preset(name) for name in ("paper", "released"))
    assert released == dataclasses.replace(paper, **RELEASED.get(method, {}))


@pytest.mark.parametrize("method", METHODS)
def test_configs_are_frozen_and_plain(method: str) -> None:
    config = METHODS[method].config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    names = {f.name for f in dataclasses.fields(config)}
    assert set(config.to_dict()) == names - set(config.later)


def test_changes_go_over_the_preset() -> None:
    config = METHODS["deyo"].config.preset("released", plpd=0.3)
    assert (config.plpd, config.filter_e0) == (0.3, 0.4)


def test_misspelt_names_get_the_nearest() -> None:
    tent = METHODS["tent"].config
    with pytest.raises(ValueError, match=r"TentConfig has no field 'momentun'.*'momentum'"):
        tent.preset(momentun=0.5)
    with pytest.raises(ValueError, match=r"no preset 'papr' for TentConfig.*'paper'"):
        tent.preset("papr")
    with pytest.raises(ValueError, match="no field 'zzz'; valid: seed, reset, lr, momentum"):
        tent.preset(zzz=1)


@pytest.mark.parametrize("value", [0, -1e-3, math.nan, math.inf, "fast", None, True])
@pytest.mark.parametrize("method", [m for m in METHODS if hasattr(METHODS[m].config, "lr")])
def test_a_learning_rate_is_a_finite_number_above_zero(method: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"lr must be (above 0|a finite number)"):
        METHODS[method].config.preset(lr=value)


@pytest.mark.parametrize(
    ("method", "values", "message"),
    [
        ("tent", {"momentum": 1.5}, "momentum must be between 0 and 1"),
        ("tent", {"momentum": "high"}, "momentum must be a finite number, got 'high'"),
        ("eata", {"e0": 0}, "e0 must be above 0"),
        ("eata", {"fisher_weight": -1}, "fisher_weight must be at least 0"),
        ("sar", {"rho": 0}, "rho must be above 0"),
        ("sar", {"decay": 2}, "decay must be between 0 and 1"),
        ("sar", {"second": "third"}, "second must be 'kept' or 'batch', got 'third'"),
        ("sar", {"predict": "last"}, "predict must be 'first' or 'perturbed', got 'last'"),
        ("deyo", {"destroy": "melt"}, "destroy must be 'patch' or 'pixel' or 'occlusion'"),
        ("deyo", {"occlude": 0}, r"occlude must be above 0 and at most 1"),
        ("deyo", {"patches": 0}, "patches must be above 0"),
        ("deyo", {"patches": 2.5}, "patches must be a whole number"),
        ("eata", {"fisher_batch": 1.5}, "fisher_batch must be a whole number"),
        ("tent", {"seed": 0.5}, "seed must be a whole number"),
        ("noadapt", {"seed": True}, "seed must be a whole number"),
        ("moetta", {"select": "no"}, "select must be True or False, got 'no'"),
        ("moetta", {"frozen": 3}, "frozen must be text in quotes, got 3"),
        ("moetta", {"frozen": [0, 1]}, r"frozen must be text in quotes, got \(0, 1\)"),
        ("moetta", {"plain": None}, "plain must be text in quotes, got None"),
        ("moetta", {"balance": "0.2"}, "balance must be a finite number, got '0.2'"),
        ("moetta", {"balance": math.inf}, "balance must be a finite number, got inf"),
        ("becotta", {"betas": 0.9}, "betas must be 2 finite numbers, got 0.9"),
        ("becotta", {"betas": (0.9,)}, "betas must be 2 finite numbers"),
        ("cotta", {"mean": 0.5, "std": 0.5}, "mean must be a tuple of finite numbers, got 0.5"),
        ("cotta", {"mean": ("a",), "std": (1,)}, "mean must be a tuple of finite numbers"),
        ("deyo", {"plpd": math.nan}, "plpd must be a finite number, got nan"),
        ("sar", {"recover_below": "x"}, "recover_below must be a finite number, got 'x'"),
        ("eata", {"decay": 5}, "decay must be between 0 and 1, got 5"),
        ("mgtta", {"mgg": 5}, "mgg must be text in quotes, got 5"),
    ],
)
def test_values_out_of_range_are_refused(method: str, values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        METHODS[method].config.preset(**values)


def test_lists_as_json_has_them_are_tuples() -> None:
    config = METHODS["cotta"].config
    assert config(mean=[0.5], std=[0.5]) == config(mean=(0.5,), std=(0.5,))
    assert config.preset(**config(mean=(0.5,), std=(0.5,)).to_dict()).mean == (0.5,)


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=10), min_size=1, max_size=5))
def test_a_hint_names_valid_words_only(name: str, valid: list[str]) -> None:
    hint = nearest(name, valid)
    assert any(repr(word) in hint for word in valid) or hint == f"valid: {', '.join(valid)}"


def test_the_base_has_a_seed() -> None:
    assert Config().to_dict() == {"seed": 0}
