"""Configurations: frozen dataclasses with named presets and helpful refusals."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for a misspelt name: the closest valid ones, or all of them."""
    options = list(valid)
    close = difflib.get_close_matches(name, options, n=3, cutoff=0.5)
    return (
        f"did you mean {' or '.join(map(repr, close))}?"
        if close
        else f"valid: {', '.join(options)}"
    )


@dataclass(frozen=True)
class Config:
    """Common ground of all methods' configurations.

    Attributes:
        seed: seed of the method's own random draws.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that are not of their field's kind."""
        kinds = get_type_hints(type(self))
        for name in (f.name for f in fields(self)):
            value, kind = getattr(self, name), kinds[name]
            if get_origin(kind) is Literal:
                valid = " or ".join(map(repr, get_args(kind)))
                require(value in get_args(kind), f"{name} must be {valid}, not {value!r}")
            elif kind is bool:
                require(isinstance(value, bool), f"{name} must be True or False, not {value!r}")
            elif kind is int:
                whole = isinstance(value, int) and not isinstance(value, bool)
                require(whole, f"{name} must be a whole number, not {value!r}")

    @classmethod
    def preset(cls, name: str = "paper", **values: Any) -> Self:
        """The named preset ("paper", "released", or one of the method's own), with changes.

        Raises:
            ValueError: no such preset or field, or a value out of range.
        """
        known = {"paper": {}, "released": {}, **cls.presets}
        if name not in known:
            raise ValueError(f"no preset {name!r} for {cls.__name__}; {nearest(name, known)}")
        names = [f.name for f in fields(cls)]
        for key in values:
            if key not in names:
                raise ValueError(f"{cls.__name__} has no field {key!r}; {nearest(key, names)}")
        return cls(**{**known[name], **values})

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return json.loads(json.dumps(asdict(self)))


def require(ok: bool, message: str) -> None:
    """Refuse a configuration value."""
    if not ok:
        raise ValueError(message)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def positive(config: Config, *names: str) -> None:
    """Refuse fields that are not finite numbers above zero."""
    for name in names:
        value = getattr(config, name)
        require(_number(value) and value > 0, f"{name} must be above 0 and finite, not {value!r}")


def share(config: Config, *names: str) -> None:
    """Refuse fields outside [0, 1]."""
    for name in names:
        value = getattr(config, name)
        require(
            _number(value) and 0 <= value <= 1, f"{name} must be between 0 and 1, not {value!r}"
        )
