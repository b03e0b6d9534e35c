"""Each of the paper's experiments, in small: its cells, its tables, the paper's figures in them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moetta.bench.cell import Cell
from moetta.bench.grid import make_grid
from moetta.commands.main import main
from moetta.commands.reproduce import Reproduce, make_workload, reproduce
from moetta.methods import list_methods
from moetta.paper.experiments import EXPERIMENTS, Experiment, Workload
from moetta.paper.experiments.main_tables import TABLE1
from moetta.paper.experiments.sweeps import ABLATIONS, LAMBDAS
from moetta.paper.experiments.theory import cosines, losses
from moetta.paper.experiments.workload import Found, no_cells
from moetta.paper.published import METHODS, by_method, published
from moetta.results.tables import Column, Entry, Table, table
from moetta.zoo.by_name import load_model

MODELS = ("tiny_models:vit", "tiny_models:convnext")


def run(name: str, out: Path, *, limit: int = 48, models: tuple[str, ...] = MODELS[:1]) -> Path:
    reproduce(Reproduce(name=name, out=out, limit=limit, models=models, batch_size=16, threads=1))
    return out / "paper" / name


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def test_the_papers_methods_are_listed_in_its_order() -> None:
    assert [name for name in list_methods() if name in METHODS] == list(METHODS)


def test_published_figures() -> None:
    table1 = published()["table1"]
    assert by_method(table1["vit_base"], "potpourri+", "noadapt") == 55.92
    assert by_method(table1["convnext_base"], "classical", "mgtta") is None
    assert by_method(table1["vit_base"], "nothing", "tent") is None


def test_table1_has_all_cells() -> None:
    cells = TABLE1.cells(Workload())
    assert len(cells) == len(set(cells)) == 9 * 3 * 2 * 3
    assert {c.seed for c in cells} == {42, 4242, 424242}
    (imagenet,) = {c.data for c in TABLE1.cells(Workload(("a", "b"), data="d"))}
    assert imagenet == "d"


def test_the_streams_suit_the_first_model() -> None:
    paper = ("classical", "potpourri", "potpourri+")
    assert Workload().streams == Workload(("vit_base_patch16_224",), data="d").streams == paper
    photos = Workload(("cifar-vit", "digits-vit"), data="d")
    assert photos.streams == (photos.classical,) == (photos.richest,) == ("cifar10-c",)
    assert "ImageNet-C" not in photos.ours
    assert "ImageNet-C was generated" in Workload(("vit_base_patch16_224",), data="d").ours


def test_table2(out: Path) -> None:
    rows = read(run("table2", out) / "table2.csv")
    assert [row["method"] for row in rows] == list(METHODS)
    moetta = rows[-1]
    assert float(moetta["time, % of noadapt, paper"]) == 247
    assert float(rows[0]["time, % of noadapt, ours"]) == 100
    assert float(rows[1]["forward, % of images, ours"]) == 100
    assert 0 < float(moetta["backward, % of images, ours"]) < 100
    gap = float(moetta["time, % of noadapt, ours"]) - 247
    assert float(moetta["time, ours - paper"]) == pytest.approx(gap)
    assert (out / "paper" / "table2" / "table2.tex").exists()


def test_table3(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = read(run("table3", out, limit=32) / "table3.csv")
    assert [row["MoETTA"] for row in rows] == [name.replace("_", " ") for name in ABLATIONS]
    full = rows[0]
    assert float(full["classical, paper %"]) == 67.25
    gap = float(full["classical, ours %"]) - 67.25
    assert float(full["classical, ours - paper"]) == pytest.approx(gap)
    assert "Not the paper's model and data" in capsys.readouterr().out


def test_scalability_reuses_finished_cells(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetta.paper.experiments.main_tables.METHODS", ("noadapt", "moetta"))
    rows = read(run("scalability", out, limit=32) / "scalability-tiny_models:vit.csv")
    assert float(rows[-1]["classical, paper %"]) == 68.8
    before = {p: p.stat().st_mtime_ns for p in out.glob("*/summary.json")}
    assert len(before) >= 6  # two methods on three streams
    assert read(run("scalability", out, limit=32) / "scalability-tiny_models:vit.csv") == rows
    assert {p: p.stat().st_mtime_ns for p in out.glob("*/summary.json")} == before


def test_a_table_of_other_methods_tells_them_from_the_papers(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Reproduce(
        name="table1", out=out, limit=16, models=MODELS[:1], batch_size=16, threads=1, seeds=(42,),
        method=("neo", "tent"),
    )  # fmt: skip
    reproduce(options)
    rows = read(out / "paper" / "table1" / "table1-tiny_models:vit.csv")
    assert [row["method"] for row in rows] == ["noadapt", "tent", "neo"]
    assert rows[1]["classical, paper %"]
    assert not rows[2]["classical, paper %"]
    assert rows[2]["classical, ours %"]
    assert "Not in the paper: neo." in capsys.readouterr().out
    every = make_workload("table1", replace(options, method=("all",)))
    assert every.methods == tuple(list_methods())


def test_grid_search(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(published()["grid_search"]) == 7
    one = {"tent": published()["grid_search"]["tent"]}
    monkeypatch.setitem(published(), "grid_search", one)
    folder = run("grid-search", out, limit=16)
    rows = read(folder / "grid-search-tent.csv")
    assert [float(row["lr, paper"]) for row in rows] == [1e-4, 5e-4, 1e-3]
    assert [float(row["accuracy, paper %"]) for row in rows] == [61.561, 63.139, 53.619]
    assert [float(row["lr, ours"]) for row in rows] == [1e-4, 5e-4, 1e-3]  # a model never tuned


def test_sensitivity(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetta.paper.experiments.sweeps.EXPERTS", (3, 9))
    folder = run("sensitivity", out, limit=16)
    rows = read(folder / "sensitivity.csv")
    assert [list(row)[1:] for row in rows] == [[f"lambda {b:g}, %" for b in LAMBDAS]] * 2
    assert (folder / "sensitivity.svg").exists()


def test_partial_replacement(out: Path) -> None:
    rows = read(run("partial-replacement", out, limit=16) / "partial-replacement.csv")
    # Five norm layers: none, 0..0 to 0..3, 1..4 to 4..4.
    assert len(rows) == 1 + 4 + 4
    assert float(rows[0]["vs all replaced"]) == 0


def test_experts(out: Path) -> None:
    similarity = run("expert-similarity", out)
    assert len(read(similarity / "expert-similarity.csv")) == 4  # all norm layers but the first
    heat = run("expert-heatmaps", out)
    rows = read(heat / "expert-heatmaps.csv")
    assert all(2 <= float(row["experts used"]) <= 9 for row in rows)
    assert (heat / "expert-weight-heatmaps.png").exists()


def test_gradient_cosine(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = read(run("gradient-cosine", out, limit=240) / "gradient-cosine.csv")
    matrix = torch.tensor([[float(row[str(i)]) for i in range(15)] for row in rows])
    assert torch.allclose(matrix, matrix.T)
    assert torch.allclose(matrix.diag(), torch.ones(15))
    lower = matrix[torch.ones(15, 15).tril(-1).bool()].mean()
    assert f"mean {lower:.2f}, paper 0.69" in " ".join(capsys.readouterr().out.split())


def test_tsne(out: Path) -> None:
    rows = read(run("tsne", out, limit=80) / "tsne.csv")
    assert [row["data set"] for row in rows] == ["c", "r", "sketch", "a"]
    assert [float(row["images"]) for row in rows] == [20] * 4
    assert all(0 <= float(row["of 10 neighbours, same set, %"]) <= 100 for row in rows)


def test_theory_first_proposition_holds() -> None:
    for d in (2, 64, 1024):
        drawn = cosines(d, 4000)
        error = float(drawn.std() / 4000**0.5)
        assert abs(float(drawn.mean()) - 0.5) < 0.3 / d + 4 * error
    assert float(cosines(2, 4000).mean()) < 0.45  # but only in the limit


def test_theory_second_proposition_does_not_hold(out: Path) -> None:
    assert float(losses(2, 3, 200, 3.0).min()) < 1
    rows = read(run("theory", out, limit=400) / "theory-2.csv")
    assert float(rows[0]["least loss, ours"]) == pytest.approx(0.8933, abs=1e-4)


@pytest.mark.parametrize("name", ["gradient-cosine", "tsne", "partial-replacement", "sensitivity"])
def test_finished_experiments_need_no_data_and_no_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetta.paper.experiments.sweeps.EXPERTS", (3,))
    monkeypatch.setattr("moetta.paper.experiments.sweeps.LAMBDAS", (0.2,))
    weights = tmp_path / "vit.safetensors"
    save_file(load_model(MODELS[0]).state_dict(), weights)
    options = Reproduce(
        name=name, out=tmp_path / "runs", limit=60, models=MODELS[:1], threads=1,
        weights=str(weights),
    )  # fmt: skip
    reproduce(options)
    first = {p.name: p.read_text() for p in tmp_path.glob("runs/paper/*/*.csv")}
    assert first

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was loaded")

    weights.unlink()
    monkeypatch.setattr("moetta.bench.protocol.load_model", refuse)
    monkeypatch.setattr("moetta.bench.protocol.make_stream", refuse)
    reproduce(options)
    assert {p.name: p.read_text() for p in tmp_path.glob("runs/paper/*/*.csv")} == first


def test_differences_from_the_paper_are_stated(tmp_path: Path) -> None:
    paper = "vit_base_patch16_224.augreg2_in21k_ft_in1k"
    workload = Workload((paper, "another"), data=str(tmp_path))
    assert "on the fly" in workload.ours
    (tmp_path / "ImageNet-C").mkdir()
    assert "have the paper's names" in workload.ours
    assert "another" not in workload.ours  # it is not in a table of the first model
    assert "16 images" in replace(workload, common={"batch_size": 16}).ours
    assert "MGTTA" not in workload.ours
    assert "MGTTA" in workload.caveat(paper, mgtta=True)


def test_length_shows_gains_by_rate_and_by_experts(out: Path) -> None:
    options = Reproduce(
        name="length",
        out=out,
        length=96,
        models=MODELS[:1],
        method=("moetta", "neo"),
        batch_size=16,
        threads=1,
    )
    reproduce(options)
    folder = out / "paper" / "length"
    rows = read(folder / "length.csv")
    names = [row["method"] for row in rows]
    assert names == ["moetta"] * 3 + ["neo"] + [
        f"moetta, {kind}" for kind in ("1 expert", "3 experts", "no experts") for _ in range(3)
    ]
    rates = [float(row["lr"]) for row in rows[:3]]
    assert rates == pytest.approx([rates[1] / 3, rates[1], 3 * rates[1]], rel=0.02)
    for row in rows:
        quarters = [float(row[f"quarter {q}"]) for q in (1, 2, 3, 4)]
        assert sum(quarters) / 4 == pytest.approx(float(row["gain"]), abs=1e-6)
    assert (folder / "length.svg").exists()
    assert (folder / "length-experts.svg").exists()


def test_methods_are_named_only_where_they_are_compared(out: Path) -> None:
    with pytest.raises(ValueError, match="--method has no effect on theory"):
        reproduce(Reproduce(name="theory", out=out, method=("tent",)))
    cells = TABLE1.cells(Workload(methods=("neo", "tent"), seeds=(1,)))
    assert {cell.method for cell in cells} == {"neo", "tent"}


def test_unknown_experiment(out: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'table1'"):
        reproduce(Reproduce(name="tabel1", out=out))
    assert set(EXPERIMENTS) == {
        *("table1", "table2", "table3", "scalability", "grid-search", "gradient-cosine", "tsne"),
        *("expert-similarity", "expert-heatmaps", "partial-replacement", "sensitivity", "theory"),
        "length",
    }


def failing(_: Workload) -> list[Cell]:
    cells = make_grid(method=["noadapt", "tent"], stream="classical", model=MODELS[0], limit=16)
    return [*cells, replace(cells[0], model="tiny_models:no_model")]


def shown(_: Workload, found: Found, __: Path) -> list[Table]:
    return [table("shown", "Shown", [Column("runs")], [[Entry(float(len(found)))]])]


def broken(_: Workload, __: Found, ___: Path) -> list[Table]:
    raise ZeroDivisionError("a table that cannot be made")


def test_all_goes_on_after_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {
        "failing": Experiment("one run of three fails", failing, shown),
        "broken": Experiment("no table", no_cells, broken),
        "theory": EXPERIMENTS["theory"],
    }
    monkeypatch.setattr("moetta.commands.reproduce.EXPERIMENTS", few)
    page = tmp_path / "page.html"
    with pytest.raises(ValueError, match="1 of 3 runs failed") as caught:
        reproduce(Reproduce(out=tmp_path, limit=200, threads=1, report=page, json=True))
    for part in ("failing: ", "noadapt classical tiny_models:no_model s42", "broken: a table that"):
        assert part in str(caught.value)
    assert page.exists()
    output = capsys.readouterr()
    events = [json.loads(line) for line in output.out.splitlines()]  # and nothing else
    tables = {e["experiment"]: e for e in events if e["event"] == "table"}
    assert tables["failing"]["rows"] == [[2.0]]
    assert "theory" in tables
    assert "ZeroDivisionError" in output.err


@pytest.mark.parametrize("name", ["gradient-cosine", "tsne"])
def test_json_is_all_there_is_on_stdout(
    name: str, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reproduce(Reproduce(name=name, out=out, limit=60, models=MODELS[:1], threads=1, json=True))
    (line,) = capfd.readouterr().out.splitlines()
    assert json.loads(line)["experiment"] == name


def test_ctrl_c_says_how_to_go_on(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    few = {"tsne": Experiment("stopped", no_cells, stop)}  # type: ignore[arg-type]
    monkeypatch.setattr("moetta.commands.reproduce.EXPERIMENTS", few)
    assert main(["reproduce", "tsne", "--out", str(out)]) == 130
    assert "the same command resumes" in capsys.readouterr().err


def test_imagenet_without_the_data_says_what_to_get(tmp_path: Path) -> None:
    options = Reproduce(name="table1", out=tmp_path / "r", data=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="imagenet-val"):
        reproduce(options)
