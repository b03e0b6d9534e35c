from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest

import moetta.report
from moetta.commands.main import main
from moetta.commands.report import make_report
from report.synthetic_results import broken_runs, mixed_runs, nine_methods, write_run


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    nine_methods(root / "runs", (42, 43), steps=60)
    return make_report(
        [root / "runs"], root / "out" / "r.html", title="A <b> & c", figures=("svg", "png", "pdf")
    )


def test_page_is_whole_and_needs_no_network(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<h1>A &lt;b&gt; &amp; c</h1>" in text
    assert text.count("<svg ") == text.count("<figure ") == 11
    for promised in (
        "Gain over the stream",
        "Accuracy over the stream",
        "Gain by domain",
        "Cost against accuracy",
        "MoETTA: load of the experts",
        "MoETTA: how alike the experts of a layer are",
        "MoETTA: which domains go to which expert",
        "Protocol cards",
        "weights_sha256",
    ):
        assert promised in text, promised
    outside = re.findall(r'(?:src|href)="(?!#|r_files/|data:)[^"]*"', text)
    assert outside == []
    assert "@import" not in text


def test_links_lead_to_files_of_their_kind(page: Path) -> None:
    links = set(re.findall(r'href="(r_files/[^"]+)"', page.read_text(encoding="utf-8")))
    files = {f"r_files/{f.name}" for f in (page.parent / "r_files").iterdir()}
    assert links == files - {"r_files/manifest.json"}
    starts = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml", ".tex": b"% needs"}
    for name in links:
        path = page.parent / name
        assert path.read_bytes().startswith(starts.get(path.suffix, b"")), name
        assert path.stat().st_size > 50
    png = next((page.parent / "r_files").glob("pareto*.png")).read_bytes()
    assert struct.unpack(">I", png[16:20])[0] > 700  # enough pixels for print


def test_nothing_is_left_behind_and_the_folder_is_only_ours_to_clean(page: Path) -> None:
    assert sorted(p.name for p in page.parent.iterdir()) == ["r.html", "r_files"]
    folder = page.parent / "r_files"
    (folder / "mine.txt").write_text("keep me")
    stale = folder / "stale.csv"
    stale.write_text("old")
    listed = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps([*listed, "stale.csv", "../r.html"]))
    make_report([write_run(page.parent.parent / "one", "noadapt", steps=20)], page)
    assert not stale.exists()
    assert (folder / "mine.txt").read_text() == "keep me"
    assert page.exists()


def test_mixed_protocols(tmp_path: Path) -> None:
    runs = mixed_runs(tmp_path / "runs")
    with pytest.raises(ValueError, match=r"batch_size.*--allow-mixed"):
        make_report([runs], tmp_path / "r.html")
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


def test_marked_when_mixed_and_broken(tmp_path: Path) -> None:
    runs = broken_runs(tmp_path / "runs")
    write_run(runs, "tent", batch_size=16, name="other")
    code = main(["report", str(runs), "-o", str(tmp_path / "r.html"), "--allow-mixed"])
    assert code == 0
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Mixed protocols on embedded-potpourri+ with digits-vit" in text
    assert "Tent [protocol 2]" in text
    for name in ("bad-card", "unfinished", "old-schema", "bad-steps/steps.parquet"):
        assert f"<code>{name}</code>" in text
    assert str(tmp_path) not in text


def test_refusals_name_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"no finished run in .*moetta demo"):
        make_report([tmp_path], tmp_path / "r.html")
    with pytest.raises(ValueError, match="is a folder; name the page"):
        moetta.report.write([], tmp_path)
    with pytest.raises(ValueError, match="no runs to report"):
        moetta.report.write([], tmp_path / "r.html")
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_only_svg_files_unless_asked(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "tent", steps=20)
    make_report([tmp_path / "runs"], tmp_path / "r.html")
    kinds = {path.suffix for path in (tmp_path / "r_files").iterdir()}
    assert kinds == {".svg", ".csv", ".md", ".tex", ".json"}


def test_names_never_break_within_a_word(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", variant="experts=9,balance=0.05", steps=20)
    page = make_report([tmp_path / "runs"], tmp_path / "r.html").read_text(encoding="utf-8")
    assert "experts=9,<wbr>balance=0.05</th>" in page
