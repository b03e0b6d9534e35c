"""Results, figures and the report are read on machines without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = """
import sys
for name in ("torch", "torchvision", "timm"):
    sys.modules[name] = None
"""


@pytest.mark.parametrize(
    "module",
    [
        "moetta.results",
        "moetta.figures",
        "moetta.report",
        "moetta.paper.published",
        "moetta.paper.beside",
        "moetta.commands.main",
        "moetta.commands.results",
        "moetta.commands.report",
    ],
)
def test_imports_without_torch(module: str) -> None:
    code = f"{BLOCKED}\nimport {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_reading_summaries_loads_neither_polars_nor_matplotlib() -> None:
    code = (
        "import sys, moetta.commands.results\n"
        "print({'polars', 'matplotlib', 'numpy', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
