"""The trials that anyone's method can be put through.

>>> from moetta.testing import check_method
>>> outcomes = check_method("tent", models=["timm_vit"], lr=0.01)
>>> any(outcome.broken for outcome in outcomes)
False
"""

from moetta.testing.check import BrokenPromises, Outcome, check_method
from moetta.testing.models import FAMILIES, Family

__all__ = ["FAMILIES", "BrokenPromises", "Family", "Outcome", "check_method"]
