"""Test-time adaptation under mixed distribution shifts.

>>> import timm, torch, moetta
>>> model = timm.create_model("test_vit", num_classes=10)
>>> adapter = moetta.adapt(model, "tent")
>>> adapter(torch.randn(4, 3, 160, 160)).shape
torch.Size([4, 10])
"""

import sys
from typing import cast

from moetta.api import adapt
from moetta.core.adapter import Adapter
from moetta.core.config import Config
from moetta.core.step_report import StepReport, Totals
from moetta.guard import Guard
from moetta.methods import Package
from moetta.methods.becotta import BECoTTAConfig
from moetta.methods.cotta import CoTTAConfig
from moetta.methods.deyo import DeYOConfig
from moetta.methods.eata import EATAConfig
from moetta.methods.mgtta import MGTTAConfig
from moetta.methods.moetta import MoETTAConfig
from moetta.methods.noadapt import NoAdaptConfig
from moetta.methods.sar import SARConfig
from moetta.methods.tent import TentConfig

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "BECoTTAConfig",
    "CoTTAConfig",
    "Config",
    "DeYOConfig",
    "EATAConfig",
    "Guard",
    "MGTTAConfig",
    "MoETTAConfig",
    "NoAdaptConfig",
    "SARConfig",
    "StepReport",
    "TentConfig",
    "Totals",
    "adapt",
    "methods",
]

# The package itself, under the type that says it can be called.
methods = cast(Package, sys.modules["moetta.methods"])
