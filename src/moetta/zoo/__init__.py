"""Small source models that come with the package: recipes, training, shipped weights, settings.

```python
model = moetta.zoo.load("digits-vit")
adapter = moetta.adapt(model, "moetta", **moetta.zoo.tuned("digits-vit", "moetta"))
```
"""

from moetta.zoo.build import TrainSource, train
from moetta.zoo.recipes import RECIPES, Recipe, recipe
from moetta.zoo.settings import tuned
from moetta.zoo.shipped import available, card, load

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
