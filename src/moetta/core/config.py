"""Configurations: frozen dataclasses with named presets, checked when they are made."""

from __future__ import annotations

import inspect
import json
import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from types import UnionType
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from moetta.core.resets import check_reset
from moetta.suggest import nearest

# "    name: text", with further lines indented deeper.
_ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


@dataclass(frozen=True)
class Config:
    """What all methods' configurations share.

    Attributes:
        seed: seed of the method's random draws.
        reset: return to the source model now and then: after so many batches, or when answers
            concentrate on few classes ("asr", with the authors' values for a ViT; "asr-resnet",
            "asr-roid" and, for their benchmark CCC, "asr-ccc0", "asr-roid-ccc0" and
            "asr-roid-ccc40" have their others); None never does.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    # Fields that came later. `to_dict` leaves them out at their defaults, so that results and
    # states from before are still recognised as the same configuration.
    later: ClassVar[tuple[str, ...]] = ("objective", "reset")

    seed: int = 0
    reset: int | str | None = None

    def __post_init__(self) -> None:
        """Refuse values that are not of their field's kind."""
        kinds = get_type_hints(type(self))
        for name in (f.name for f in fields(self)):
            value, kind = getattr(self, name), kinds[name]
            if isinstance(value, list):  # JSON and TOML have no tuples
                value = tuple(value)
                object.__setattr__(self, name, value)
            wanted = _unlike(value, kind)
            require(wanted is None, f"{name} must be {wanted}, got {value!r}")
        check_reset(self.reset)

    @property
    def needs_source(self) -> bool:
        """Whether a method with these settings needs source images."""
        return False

    def with_pixels(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Self:
        """These settings for images normalised by ``mean`` and ``std``, where that matters.

        Values that are set already are kept.
        """
        return self

    @classmethod
    def preset(cls, name: str = "paper", **values: Any) -> Self:
        """The named preset ("paper", "released" or another of the method's), with changes.

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

    @classmethod
    def field_docs(cls) -> dict[str, str]:
        """What each field means, from the docstrings of the class and those it extends."""
        docs: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            text = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
            for name, meaning in _ENTRY.findall(text):
                docs[name] = " ".join(meaning.split())
        return docs

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        usual = {f.name: f.default for f in fields(self) if f.name in self.later}
        return {k: v for k, v in values.items() if k not in usual or v != usual[k]}


def require(ok: bool, message: str) -> None:
    """Refuse a configuration value."""
    if not ok:
        raise ValueError(message)


def _number(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, (int, float)) and math.isfinite(value)


def _unlike(value: Any, kind: Any) -> str | None:
    """What a value of this annotation must be, in words; None if this one is."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:  # a kind, or None
        return None if value is None or len(inner) > 2 else _unlike(value, inner[0])
    if origin is Literal:
        return None if value in inner else " or ".join(map(repr, inner))
    if origin is tuple and inner[0] is float:
        some = isinstance(value, tuple) and all(map(_number, value))
        if inner[-1] is Ellipsis:
            return None if some else "a tuple of finite numbers"
        return None if some and len(value) == len(inner) else f"{len(inner)} finite numbers"
    tests = {
        bool: (isinstance(value, bool), "True or False"),
        int: (isinstance(value, int) and not isinstance(value, bool), "a whole number"),
        float: (_number(value), "a finite number"),
        str: (isinstance(value, str), "text in quotes"),
    }
    fits, words = tests.get(kind, (True, ""))
    return None if fits else words


def positive(config: Config, *names: str) -> None:
    """Refuse fields that are not finite numbers above zero."""
    for name in names:
        value = getattr(config, name)
        require(_number(value) and value > 0, f"{name} must be above 0 and finite, got {value!r}")


def share(config: Config, *names: str) -> None:
    """Refuse fields outside [0, 1]."""
    for name in names:
        value = getattr(config, name)
        require(
            _number(value) and 0 <= value <= 1, f"{name} must be between 0 and 1, got {value!r}"
        )


def parse_overrides(texts: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """Texts such as ``lr=1e-3`` as (field, value) pairs; a value is TOML, or else plain text.

    >>> parse_overrides(["lr=1e-3", "select=false", "frozen=0-3"])
    (('lr', 0.001), ('select', False), ('frozen', '0-3'))
    """
    pairs: list[tuple[str, Any]] = []
    for text in texts:
        name, equals, raw = text.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"--set takes field=value, such as lr=1e-3, got {text!r}")
        try:
            value = tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            value = {"true": True, "false": False, "none": None}.get(raw.lower(), raw)
        pairs.append((name.strip(), tuple(value) if isinstance(value, list) else value))
    return tuple(pairs)
