import pytest

import moetta
from moetta import zoo
from moetta.zoo.recipes import RECIPES


def test_tuned_settings_are_fields_of_their_method():
    for name in RECIPES:
        for method, parts in moetta.list_methods().items():
            parts.config.preset(**zoo.tuned(name, method))
        moetta.adapt(zoo.load(name), "moetta", **zoo.tuned(name, "moetta"))
    with pytest.raises(ValueError, match="did you mean 'tent'"):
        zoo.tuned("digits-vit", "tnet")
    with pytest.raises(ValueError, match="no shipped model"):
        zoo.tuned("nobody", "tent")
