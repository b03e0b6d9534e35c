"""Every Python and shell block of README and docs runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.doc_blocks import ROOT, Block, blocks, pages, run


def name(value: Path | Block) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


PAGES = {page: list(blocks(page)) for page in pages()}
SLOW = [page for page, found in PAGES.items() if any(block.slow for block in found)]
NOT_RUN = [block for found in PAGES.values() for block in found if block.not_run]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A page's namespace. Set-up may use `monkeypatch`, so that its stand-ins go away again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return {"__name__": "__main__", "monkeypatch": monkeypatch}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page(page: Path, tmp_path: Path, names: dict[str, Any]) -> None:
    run([block for block in PAGES[page] if not block.slow and not block.not_run], tmp_path, names)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", SLOW, ids=name)
def test_slow_page(page: Path, tmp_path: Path, names: dict[str, Any]) -> None:
    run([block for block in PAGES[page] if not block.not_run], tmp_path, names)


@pytest.mark.parametrize("block", NOT_RUN, ids=name)
def test_not_run(block: Block) -> None:
    pytest.skip(f"{block} is not run: {block.not_run}")


def test_few_blocks_are_not_run() -> None:
    assert len(NOT_RUN) <= 8
