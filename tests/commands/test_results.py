"""`moetta results`: what is shown together, and what is said of what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from moetta.commands.main import main
from report.synthetic_results import write_run


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["results", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["results", *map(str, arguments)]) == 1
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two protocols of as many images: only the batch size differs."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("noadapt", "tent"):
        write_run(folder, method, batch_size=64, steps=20)
        write_run(folder, method, batch_size=32, steps=40)
    return folder


def test_each_protocol_has_its_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, root)
    assert text.count("┏") == 2
    for size in (32, 64):
        assert f"1,280 images (stream.batch_size={size})" in text
    rows = json.loads(shown(capsys, root, "--json"))
    assert len({row["protocol"] for row in rows}) == 2
    assert {row["protocol_differs"] for row in rows} == {
        "stream.batch_size=32",
        "stream.batch_size=64",
    }


def test_one_protocol_needs_no_mark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        write_run(tmp_path, "tent", seed, steps=20)
    assert "1,280 images  " in shown(capsys, tmp_path)


def test_configurations_of_one_name_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for lr in (0.1, 0.2):
        write_run(tmp_path, "tent", config={"lr": lr}, name=f"lr{lr}", steps=20)
    text = shown(capsys, tmp_path)
    assert "tent (lr=0.1)" in text
    assert "tent (lr=0.2)" in text


def test_domains_for_people_and_machines(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, root, "--by-domain")
    assert text.count("gaussian_noise") == 2  # one table a protocol
    rows: list[dict[str, Any]] = json.loads(shown(capsys, root, "--by-domain", "--json"))
    assert all(0 <= row["by_domain"]["gaussian_noise"] <= 100 for row in rows)
    assert f"{rows[0]['by_domain']['fog']:.2f}" in text
    assert "by_domain" not in json.loads(shown(capsys, root, "--json"))[0]


def test_gain_along_the_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method, right in (("noadapt", [32] * 80), ("tent", [48] * 40 + [16] * 40)):
        path = write_run(tmp_path, method, steps=80, batch_size=64) / "steps.parquet"
        columns = pl.Series("correct", right), pl.Series("correct_noadapt", [32] * 80)
        pl.read_parquet(path).with_columns(*columns).write_parquet(path)
    rows = json.loads(shown(capsys, tmp_path, "--along", "--json"))
    found = {row["method"]: (row["quarters"], row["best_stop"]) for row in rows}
    assert found["noadapt"] == (None, None)
    quarters, stop = found["tent"]
    # One of the six windows lies across the middle of the stream.
    assert quarters[0] == pytest.approx(25)
    assert quarters[3] == pytest.approx(-25)
    assert abs(stop - 40 * 64) < 80 * 64 / 6
    text = shown(capsys, tmp_path, "--along")
    assert "+25.00" in text
    assert f"{stop:,.0f}" in text
    assert "best_stop" not in json.loads(shown(capsys, tmp_path, "--json"))[0]


def test_one_table_at_a_time(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "ask for one of them" in refused(capsys, root, "--along", "--by-domain")


def test_what_is_filtered_out_can_still_be_compared_with(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = json.loads(shown(capsys, root, "--json", "--against", "tent"))
    some = json.loads(
        shown(capsys, root, "--json", "--against", "tent", "--filter", "method=noadapt")
    )
    assert some == [row for row in every if row["method"] == "noadapt"]
    assert all(row["gain"] < 0 for row in some)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filter", "method=tnet"], "did you mean 'tent'? (valid: noadapt, tent)"),
        (["--filter", "model=xyz"], "no run has model 'xyz'; valid: digits-vit"),
        (["--filter", "variant=a"], "no run has any variant"),
        (["--filter", "methd=tent"], "did you mean 'method'"),
        (["--against", "tnet"], "did you mean 'tent'"),
        (["--sort", "by_domain"], "no column 'by_domain'"),
        (["--sort", "acuracy"], "did you mean 'accuracy'"),
    ],
)
def test_misspelt(
    arguments: list[str], message: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, root, *arguments)


@pytest.mark.parametrize("command", ["results", "report"])
def test_a_misspelt_folder(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    assert main([command, str(tmp_path / "rnus")]) == 1
    assert f"did you mean {tmp_path / 'runs'}?" in capsys.readouterr().err
