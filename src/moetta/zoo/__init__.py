"""Shipped models: small models that come with the package, with their recipes and tuned settings.

>>> import moetta
>>> model = moetta.zoo.load("digits-vit")
>>> adapter = moetta.adapt(model, "moetta", **moetta.zoo.tuned("digits-vit", "moetta"))
"""

from moetta.zoo.recipes import RECIPES, Recipe, recipe
from moetta.zoo.shipped_models import available, card, load
from moetta.zoo.train_and_measure import train_model
from moetta.zoo.tuned_settings import tuned

__all__ = [
    "RECIPES",
    "Recipe",
    "available",
    "card",
    "load",
    "recipe",
    "train_model",
    "tuned",
]
