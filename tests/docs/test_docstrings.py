"""Every `>>>` in the sources gives what it shows."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from helpers.doc_blocks import ROOT

SOURCES = sorted(path for path in (ROOT / "src").rglob("*.py") if ">>>" in path.read_text())


def module(path: Path) -> str:
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_docstrings(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(
        importlib.import_module(module(path)), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert result.attempted == path.read_text().count(">>> ")
    assert result.failed == 0
