"""Test-time adaptation under mixed distribution shifts.

>>> import timm, torch, moetta
>>> model = timm.create_model("test_vit", num_classes=10)
>>> adapter = moetta.adapt(model, "tent")
>>> adapter(torch.randn(4, 3, 160, 160)).shape
torch.Size([4, 10])

Nothing is imported until it is used: what only reads results never loads torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moetta import data, methods, testing, zoo
    from moetta.api import adapt
    from moetta.core.adapter import Adapter
    from moetta.core.config import Config
    from moetta.core.inputs import Inputs
    from moetta.core.norm_affine import NormAffineAdapter, SGDConfig
    from moetta.core.objective import Objective, Step
    from moetta.core.step_report import StepReport, Totals
    from moetta.guard import Guard
    from moetta.methods.registry import Citation, Drawn, Method, list_methods, register

__version__ = "0.2.0"

_HOMES = {
    "Adapter": "moetta.core.adapter",
    "Citation": "moetta.methods",
    "Config": "moetta.core.config",
    "Drawn": "moetta.methods",
    "Guard": "moetta.guard",
    "Inputs": "moetta.core.inputs",
    "Method": "moetta.methods",
    "NormAffineAdapter": "moetta.core.norm_affine",
    "Objective": "moetta.core.objective",
    "SGDConfig": "moetta.core.norm_affine",
    "Step": "moetta.core.objective",
    "StepReport": "moetta.core.step_report",
    "Totals": "moetta.core.step_report",
    "adapt": "moetta.api",
    "list_methods": "moetta.methods",
    "register": "moetta.methods",
}
_ROOMS = ("data", "methods", "testing", "zoo")

__all__ = [
    "Adapter",
    "Citation",
    "Config",
    "Drawn",
    "Guard",
    "Inputs",
    "Method",
    "NormAffineAdapter",
    "Objective",
    "SGDConfig",
    "Step",
    "StepReport",
    "Totals",
    "adapt",
    "data",
    "list_methods",
    "methods",
    "register",
    "testing",
    "zoo",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used; a method's configuration class is found by its name."""
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _ROOMS:
        value = importlib.import_module(f"moetta.{name}")
    elif name.endswith("Config"):
        value = _config(name)
    else:
        raise AttributeError(f"module 'moetta' has no attribute {name!r}")
    globals()[name] = value
    return value


def _config(name: str) -> Any:
    from moetta.methods import list_methods

    for method in list_methods().values():
        if method.config.__name__ == name:
            return method.config
    raise AttributeError(f"module 'moetta' has no attribute {name!r}; no method has this config")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
