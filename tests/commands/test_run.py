"""A run's results say what really happened on the stream."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import vit

import moetta
from moetta.bench import Cell, run_grid
from moetta.bench.grid import require_all
from moetta.bench.protocol import prepare
from moetta.commands.options import only_grouped
from moetta.data import embedded
from moetta.paper.beside import published_for
from moetta.report import contents
from moetta.results import compare
from moetta.results.runs import Run, load_run

CELL = Cell("moetta", "classical", "tiny_models:vit", limit=200, batch_size=32, threads=1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("runs")
    cells = [replace(CELL, method=m, source_images=32) for m in ("moetta", "eata", "noadapt")]
    outcomes = run_grid(cells, root)
    assert [o.error for o in outcomes] == [None] * 3
    return {c.method: load_run(o.folder) for c, o in zip(cells, outcomes, strict=True) if o.folder}


@pytest.mark.parametrize("method", ["moetta", "noadapt"])
def test_figures_are_those_of_a_plain_loop(method: str, runs: dict[str, Run]) -> None:
    adapter = moetta.adapt(vit(), method, seed=42)
    right = five = seen = 0
    by_domain: dict[str, list[bool]] = {}
    stream = embedded.stream("classical", seed=42, batch_size=32, limit=200)
    for batch in stream:
        logits = adapter(batch.images)
        hits = logits.argmax(1) == batch.labels
        right, seen = right + int(hits.sum()), seen + len(hits)
        five += int((logits.topk(5).indices == batch.labels[:, None]).any(1).sum())
        for domain, hit in zip(batch.domains.tolist(), hits.tolist(), strict=True):
            by_domain.setdefault(stream.domain_names[domain], []).append(hit)
    summary = runs[method].summary
    assert summary["samples"] == seen == 200
    assert summary["accuracy"] == right / seen
    assert summary["top5"] == five / seen
    assert {n: d["accuracy"] for n, d in summary["by_domain"].items()} == {
        name: sum(hits) / len(hits) for name, hits in by_domain.items()
    }
    cost, totals = summary["cost"], adapter.totals
    assert (cost["forwards"], cost["backwards"]) == (totals.forwards, totals.backwards)
    assert cost["activated_parameters"] == adapter.activated_parameters
    assert cost["peak_memory_bytes"] > 1e7


def test_tables(runs: dict[str, Run]) -> None:
    run = runs["moetta"]
    steps, domains = run.frame("steps"), run.frame("domains")
    assert steps["step"].to_list() == list(range(7))
    assert steps["samples"].sum() == domains["samples"].sum() == 200
    assert steps["correct"].sum() == domains["correct"].sum()
    assert {"entropy", "selected_share", "loss_entropy", "loss_balance"} <= set(steps.columns)
    assert steps["correct_noadapt"].to_list() == runs["noadapt"].frame("steps")["correct"].to_list()
    experts = run.frame("experts")
    layers = experts["layer"].n_unique()
    assert experts["count"].sum() == 200 * layers
    tensors = load_file(run.folder / "experts.safetensors")
    assert len(tensors) == 2 * layers
    assert run.frame("similarity")["layer"].n_unique() == layers
    assert not (runs["eata"].folder / "experts.parquet").exists()


def test_costs_are_relative_to_noadapt_in_the_same_run(runs: dict[str, Run]) -> None:
    assert runs["noadapt"].summary["cost"]["time_ratio"] == 1
    steps = runs["moetta"].frame("steps")
    assert steps["seconds_noadapt"].null_count() == 0  # a short stream is compared batch by batch
    later = steps.slice(1)  # the first batch warms up
    ratio = (later["seconds"] / later["seconds_noadapt"]).median()
    assert runs["moetta"].summary["cost"]["time_ratio"] == pytest.approx(ratio)


def test_a_process_that_was_stopped_for_a_while_does_not_spoil_the_time_ratio() -> None:
    from moetta.bench.meter import Meter
    from moetta.bench.run_folder import cost

    meter = Meter(["c"], 6)
    meter.columns = {
        "seconds": [9.0, 0.2, 0.2, 3600.0, 0.2, 0.2],
        "seconds_noadapt": [5.0, 0.1, float("nan"), 0.1, 0.1, 0.1],
        "samples": [10.0] * 6,
    }
    found = cost(meter, moetta.adapt(vit(), "noadapt"), peak=1)
    assert found["time_ratio"] == pytest.approx(2)
    assert found["seconds_noadapt"] == pytest.approx(0.6)


def test_card_states_the_protocol(runs: dict[str, Run]) -> None:
    card = runs["eata"].card
    assert card["schema"] == 1
    assert card["protocol"]["stream"]["samples"] == 200
    assert card["protocol"]["stream"]["seed"] == 42
    assert card["protocol"]["source"] == {"images": 32, "from": "embedded training digits"}
    assert card["config"]["lr"] == 6e-4
    fingerprint = moetta.adapt(vit(), "noadapt").fingerprint()
    assert card["protocol"]["model"]["weights_sha256"] == fingerprint
    assert len({run.protocol for run in runs.values()}) == 1


def test_the_paper_is_compared_with_a_real_run(runs: dict[str, Run]) -> None:
    """By the stream's name as cards have it."""
    (comparison,) = compare(runs.values())
    (published,) = published_for(runs.values()).values()
    made = contents.accuracies(comparison, published)
    place = [column.title for column in made.columns].index("Paper")
    assert {row[0].value: row[place].value for row in made.rows}["MoETTA"] == 67.2
    assert "on embedded-classical (200 images)" in made.notes[0]


def test_other_protocol_other_folder() -> None:
    keys = {
        prepare(cell).key
        for cell in (
            CELL,
            replace(CELL, limit=100),
            replace(CELL, seed=1),
            replace(CELL, batch_size=16),
            replace(CELL, overrides=(("lr", 0.5),), variant="lr=0.5"),
        )
    }
    assert len(keys) == 5
    assert prepare(replace(CELL, experiment="table1")).key in keys


def test_a_silent_models_pixels_are_the_streams() -> None:
    config = prepare(replace(CELL, method="cotta")).config
    assert (config.mean, config.std) == ((0.5,) * 3, (0.25,) * 3)  # type: ignore[attr-defined]


def test_without_noadapt_the_baseline_is_sampled(tmp_path: Path, runs: dict[str, Run]) -> None:
    cell = replace(CELL, method="tent", batch_size=1, limit=130)
    (outcome,) = run_grid([cell], tmp_path)
    assert outcome.folder is not None
    steps = load_run(outcome.folder).frame("steps")
    assert steps["correct_noadapt"].is_not_null().to_list() == [i % 2 == 0 for i in range(130)]


def test_clean_images_and_forgetting(tmp_path: Path) -> None:
    """On a stream with clean images, forgetting is what the source model gets right there more."""
    from moetta.bench.meter import Meter
    from moetta.bench.run_folder import summarise

    meter = Meter(["c", "clean"], 4)
    meter.counts[1, 0] = torch.tensor([10, 9])
    meter.counts[1, 3] = torch.tensor([10, 6])
    paired = torch.zeros(2, 4, 3, dtype=torch.int64)
    paired[1, 3] = torch.tensor([10, 6, 8])
    meter.columns = {"seconds": [1.0], "seconds_noadapt": [0.5], "samples": [20.0]}
    steps = pl.DataFrame({"step": [0], "correct": [1], "correct_noadapt": [2]})
    summary = summarise(meter, moetta.adapt(vit(), "noadapt"), steps, paired, 1)
    assert summary["clean_accuracy_first_quarter"] == 0.9
    assert summary["clean_accuracy_last_quarter"] == 0.6
    assert summary["forgetting"] == pytest.approx(20)
    assert summary["cost"]["time_ratio"] == 2


@pytest.mark.parametrize("name", ["summary", "card"])
def test_a_run_that_cannot_be_read_is_run_again(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cell = replace(CELL, method="noadapt", limit=64)
    (first,) = run_grid([cell], tmp_path)
    assert first.folder is not None
    whole = load_run(first.folder).summary["accuracy"]
    broken = first.folder / f"{name}.json"
    broken.write_text("{")
    (second,) = run_grid([cell], tmp_path)
    assert second.folder == first.folder
    assert load_run(first.folder).summary["accuracy"] == whole
    assert caplog.text.count(str(broken)) == 1


@pytest.mark.parametrize("damage", [b"PAR1 no", None])
def test_a_damaged_noadapt_costs_only_the_full_comparison(
    damage: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cells = [replace(CELL, method=m, batch_size=1, limit=130) for m in ("noadapt", "tent")]
    (baseline,) = run_grid(cells[:1], tmp_path)
    assert baseline.folder is not None
    steps = baseline.folder / "steps.parquet"
    if damage is None:
        steps.unlink()
    else:
        steps.write_bytes(damage)
    _, tent = run_grid(cells, tmp_path)
    assert tent.folder is not None, tent.error
    sampled = load_run(tent.folder).frame("steps")["correct_noadapt"]
    assert sampled.null_count() == 65
    assert str(steps) in caplog.text


def test_a_failing_cell_leaves_the_others_alone(tmp_path: Path) -> None:
    cells = [CELL, replace(CELL, model="tiny_models:no_model")]
    good, bad = run_grid(cells, tmp_path)
    assert good.folder is not None
    assert bad.error is not None
    assert "not a torch.nn.Module" in bad.error
    assert json.loads((good.folder / "summary.json").read_text())["finished"]


def test_a_group_leaves_out_what_the_model_does_not_suit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = replace(CELL, limit=32)
    cells = [replace(small, method=method) for method in ("noadapt", "norm", "neo")]
    outcomes = run_grid(cells, tmp_path)
    assert [o.refused for o in outcomes] == [False, True, False]
    assert only_grouped(["no-gradient", "neo"]) == {"norm", "alpha_bn", "lame", "gain"}
    require_all(cells, outcomes, only_grouped(["no-gradient"]))
    assert "left out: norm classical tiny_models:vit s42: norm replaces" in caplog.text
    for named in ({"neo"}, set[str]()):  # asked for by its name
        with pytest.raises(ValueError, match=r"1 of 3 runs failed\nnorm .*norm replaces"):
            require_all(cells, outcomes, named)
    with pytest.raises(ValueError, match="1 of 1 runs failed"):  # and nothing else to show
        require_all(cells[1:2], outcomes[1:2], {"norm"})


def test_a_group_does_not_hide_a_failure(tmp_path: Path) -> None:
    cells = [replace(CELL, method="noadapt", limit=32), replace(CELL, model="tiny_models:no_model")]
    with pytest.raises(ValueError, match=r"not a torch\.nn\.Module"):
        require_all(cells, run_grid(cells, tmp_path), {"moetta"})
