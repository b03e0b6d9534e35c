"""The site builds without a warning, and reading it needs no other server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from helpers.doc_blocks import ROOT

# What a browser fetches by itself; an ordinary link is fetched only on a click.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//[^>]+"
    r"|<link[^>]*rel=[\"']?(?:stylesheet|preconnect|preload)[^>]*https?://[^>]+"
    r"|<link[^>]*https?://[^>]*rel=[\"']?(?:stylesheet|preconnect|preload)[^>]*"
)


def test_the_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").glob("*.html"))
    assert len(pages) >= len(list((ROOT / "docs").glob("*.md")))
    for page in pages:
        assert not FETCHED.findall(page.read_text()), page.name


def test_the_pattern_finds_what_a_browser_would_fetch() -> None:
    assert FETCHED.search('<script src="https://cdn.example/x.js"></script>')
    assert FETCHED.search("<link rel=stylesheet href=https://fonts.example/css>")
    assert FETCHED.search('<link href="https://fonts.example" rel="preconnect">')
    assert not FETCHED.search('<a href="https://arxiv.org/abs/2511.13760">paper</a>')
