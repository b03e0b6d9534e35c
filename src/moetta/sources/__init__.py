"""Small source models that come with the package: recipes, training, shipped weights, settings.

```python
model = moetta.sources.load("digits-vit")
adapter = moetta.adapt(model, "moetta", **moetta.sources.tuned("digits-vit", "moetta"))
```
"""

from moetta.sources.making import TrainSource, train
from moetta.sources.recipes import RECIPES, Recipe, recipe
from moetta.sources.settings import tuned
from moetta.sources.shipped import available, card, load

__all__ = [
    "RECIPES",
    "Recipe",
    "TrainSource",
    "available",
    "card",
    "load",
    "recipe",
    "train",
    "tuned",
]
