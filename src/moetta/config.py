"""Configurations: frozen dataclasses with named presets and helpful refusals."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self


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


def positive(config: Config, *names: str) -> None:
    """Refuse fields that are not above zero."""
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{name} must be above 0, not {value}")


def share(config: Config, *names: str) -> None:
    """Refuse fields outside [0, 1]."""
    for name in names:
        value = getattr(config, name)
        require(0 <= value <= 1, f"{name} must be between 0 and 1, not {value}")
