"""Test-time adaptation under mixed distribution shifts.

>>> import timm, torch, moetta
>>> model = timm.create_model("test_vit", num_classes=10)
>>> adapter = moetta.adapt(model, "tent")
>>> adapter(torch.randn(4, 3, 160, 160)).shape
torch.Size([4, 10])
"""

from moetta.adapter import Adapter
from moetta.api import adapt
from moetta.config import Config
from moetta.methods import methods
from moetta.step_report import StepReport, Totals

__version__ = "0.1.0"

__all__ = ["Adapter", "Config", "StepReport", "Totals", "adapt", "methods"]
