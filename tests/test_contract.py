"""Promises about the package that no single room keeps."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# import-linter reads sources; parent packages run at import too, and only a process shows that.
WITHOUT_TORCH = [
    "moetta.results",
    "moetta.report",
    "moetta.figures",
    "moetta.paper.published",
    "moetta.paper.beside",
]


def heavy_modules(module: str) -> str:
    code = f"import sys, {module}; print(sorted({{'torch', 'timm'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_is_imported_without_torch(module: str) -> None:
    assert heavy_modules(module) == "[]"


def test_the_check_above_would_see_torch() -> None:
    assert "torch" in heavy_modules("moetta.nn.moe")


def test_the_oldest_versions_tested_are_the_oldest_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = dict(requirement.split(">=") for requirement in project["dependencies"])
    pinned = re.findall(r"^(\w+)==(\S+)$", (ROOT / ".github" / "oldest.txt").read_text(), re.M)
    assert {name for name, _ in pinned} == {"torch", "torchvision", "timm"}
    for name, version in pinned:
        assert version == allowed[name] or version.startswith(f"{allowed[name]}."), name
