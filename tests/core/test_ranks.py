"""One batch over 2 and 3 gloo ranks gives what one process gives; what cannot is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moetta
from helpers import rank_cases
from helpers.ranks import Case, run_on_ranks
from helpers.trials import REFUSED

RESNET = ("tent", "sar", "moetta", "norm", "alpha_bn", "rotta", "cotta", "zerosiam")
"""Methods to try on a model with BatchNorm: each kind of layer that replaces one."""
OTHERS = {"timm_swin": ("moetta", "becotta"), "hf_bert": ("moetta", "eata"), "tv_vit": ("rem",)}
OTHERS |= {"timm_resnet_gn": ("deyo", "moetta"), "timm_convnext": ("moetta_plus", "mgtta")}
OPTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("tent", "timm_vit", {"reset": 2}),
    ("tent", "timm_vit", {"reset": "asr"}),
    ("tent", "timm_vit", {"objective": "come"}),
    ("sar", "timm_vit", {"preset": "released"}),
    ("deyo", "timm_vit", {"destroy": "pixel"}),
    ("deyo", "timm_vit", {"patches": 3}),
    ("cotta", "timm_vit", {"threshold": 1.0, "augmentations": 2}),
    ("roid", "timm_vit", {"filter": "cmf", "prior": "logits"}),
    ("spa", "timm_vit", {"extra": "eta"}),
    ("lame", "timm_vit", {"affinity": "knn"}),
    ("neo", "timm_vit", {"average": "recent"}),
    ("becotta", "timm_vit", {"top_k": 2, "routers": 3}),
    ("moetta", "timm_vit", {"top_k": 2, "router_scope": "model"}),
    ("moetta", "timm_vit", {"routing": "batch"}),
    ("moetta", "timm_vit", {"routing": "batch", "batch_balance": "window", "balance": 0.5}),
    ("moetta", "timm_vit", {"preset": "released"}),
    ("moetta", "timm_resnet", {"batch_statistics": True}),
    ("moetta_plus", "timm_vit", {"style_warmup": 16, "styles": 3}),
]


def _pairs() -> list[tuple[str, str, dict[str, Any]]]:
    every = [(method, "timm_vit", {}) for method in moetta.list_methods()]
    every += [(method, "timm_resnet", {}) for method in RESNET]
    every += [(method, family, {}) for family, methods in OTHERS.items() for method in methods]
    return [(m, f, o) for m, f, o in every + OPTIONS if (m, f) not in REFUSED]


def _cases() -> list[Case]:
    cases: list[Case] = []
    for method, family, options in _pairs():
        name = "-".join([method, family, *(f"{k}={v}" for k, v in options.items())])
        cases.append((f"equals {name}", rank_cases.equals_one_process, (method, family, options)))
    cases += [(f"float32 {m}", rank_cases.in_float32, (m,)) for m in ("noadapt", "tent", "moetta")]
    cases += [
        (f"nothing selected {m}", rank_cases.selects_nothing_on_one_rank, (m, field))
        for m, field in (("rdumb", "e0"), ("sar", "e0"), ("becotta", "e0"), ("deyo", "filter_e0"))
    ]
    cases += [
        (f"resumes {m}", rank_cases.pauses_resets_and_resumes, (m,))
        for m in ("moetta", "cotta", "rotta", "lame")
    ]
    rest = (
        rank_cases.under_autocast,
        rank_cases.picks_in_any_order,
        rank_cases.bad_batch_on_one_rank,
        rank_cases.huge_values_on_one_rank,
        rank_cases.listener_fails_on_one_rank,
        rank_cases.out_of_step,
        rank_cases.diverged,
        rank_cases.unlike_ranks,
        rank_cases.methods_from_outside,
        rank_cases.models_that_cannot,
        rank_cases.a_row_that_counts_for_nothing_does_no_harm,
        rank_cases.silent_rank,
        rank_cases.counts_bytes,
        rank_cases.one_member,
    )
    return cases + [(f.__name__.replace("_", " "), f, ()) for f in rest]


CASES = _cases()
# With three ranks: every method, and what depends on the number of ranks.
FEWER = [
    case
    for case in CASES
    if case[0].startswith(("nothing selected", "bad batch", "huge", "picks", "a row"))
    or (case[0].startswith("equals") and "resnet" not in case[0] and "=" not in case[0])
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("two")
    return run_on_ranks(2, CASES, folder)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("three")
    return run_on_ranks(3, FEWER, folder)


@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_two_ranks(two: dict[str, str], name: str) -> None:
    assert two[name] == ""


@pytest.mark.parametrize("name", [case[0] for case in FEWER])
def test_three_ranks(three: dict[str, str], name: str) -> None:
    assert three[name] == ""
