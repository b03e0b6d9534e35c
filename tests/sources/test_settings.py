import pytest

import moetta
from moetta import sources
from moetta.sources.recipes import RECIPES


def test_tuned_settings_are_fields_of_their_method():
    for name in RECIPES:
        for method, parts in moetta.methods().items():
            parts.config.preset(**sources.tuned(name, method))
        moetta.adapt(sources.load(name), "moetta", **sources.tuned(name, "moetta"))
    with pytest.raises(ValueError, match="did you mean 'tent'"):
        sources.tuned("digits-vit", "tnet")
    with pytest.raises(ValueError, match="no source model"):
        sources.tuned("nobody", "tent")
