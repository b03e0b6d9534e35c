"""The notebook runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

import os

import nbformat
import pytest
from nbclient import NotebookClient

from helpers.doc_blocks import ROOT

TOUR = ROOT / "examples" / "tour.ipynb"


def test_the_tour_runs(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(TOUR, as_version=4)
    client = NotebookClient(notebook, timeout=200, resources={"metadata": {"path": tmp_path}})
    client.execute(env=dict(os.environ))
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert "continues bit for bit" in printed
    assert "the source model again" in printed


def test_the_tour_is_stored_without_outputs() -> None:
    cells = [cell for cell in nbformat.read(TOUR, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert not any(cell.outputs or cell.execution_count for cell in cells)
