from __future__ import annotations

from dataclasses import dataclass

import pytest

import moetta
from moetta import Adapter, Config
from moetta.methods import find, of_config, register


@dataclass(frozen=True)
class Documented(Config):
    """A config.

    Attributes:
        strength: how much.
    """

    strength: float = 1.0


class Nothing(Adapter):
    pass


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="'tent' is registered already"):
        register("tent", Documented, Nothing, "again")


def test_configs_must_be_frozen() -> None:
    @dataclass
    class Thawed:
        """Not a Config.

        Attributes:
            seed: one.
        """

        seed: int = 0

    with pytest.raises(ValueError, match="must be a frozen dataclass that extends Config"):
        register("new", Thawed, Nothing, "")  # type: ignore[arg-type]


def test_every_field_must_be_documented() -> None:
    @dataclass(frozen=True)
    class Secretive(Config):
        """Says nothing."""

        strength: float = 1.0

    with pytest.raises(ValueError, match="does not document its field 'strength'"):
        register("new", Secretive, Nothing, "")
    assert "new" not in moetta.methods()


def test_a_broken_preset_fails_at_registration() -> None:
    @dataclass(frozen=True)
    class Broken(Documented):
        """A config.

        Attributes:
            strength: how much.
        """

        presets = {"odd": {"weight": 1}}  # noqa: RUF012

    with pytest.raises(TypeError, match="weight"):
        register("new", Broken, Nothing, "")
    assert "new" not in moetta.methods()


def test_the_listing_is_a_copy() -> None:
    moetta.methods().clear()
    assert "tent" in moetta.methods()


def test_methods_are_found_by_name_and_by_config() -> None:
    for name, method in moetta.methods().items():
        assert find(name) is of_config(method.config()) is method
        assert method.adapter.method == name
