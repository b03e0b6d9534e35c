"""The methods by name."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass

from moetta.core.adapter import Adapter
from moetta.core.config import Config
from moetta.suggest import nearest


@dataclass(frozen=True)
class Method:
    """A method's parts.

    Attributes:
        name: what users call it.
        config: its configuration class.
        adapter: its adapter class.
        summary: one line for listings.
    """

    name: str
    config: type[Config]
    adapter: type[Adapter]
    summary: str


_METHODS: dict[str, Method] = {}


def register(name: str, config: type[Config], adapter: type[Adapter], summary: str) -> None:
    """Add a method; refuses one that would break what all methods promise.

    Raises:
        ValueError: the name is taken, or the configuration is not a frozen, documented dataclass
            with a default for every field.
    """
    if name in _METHODS:
        raise ValueError(f"method {name!r} is registered already")
    frozen = is_dataclass(config) and config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if not frozen or not issubclass(config, Config):
        raise ValueError(f"{config.__name__} must be a frozen dataclass that extends Config")
    for field in fields(config):
        if f"{field.name}:" not in (config.__doc__ or "") + (Config.__doc__ or ""):
            raise ValueError(f"{config.__name__} does not document its field {field.name!r}")
    for preset in ("paper", *config.presets):
        config.preset(preset)  # a preset that does not build fails here, not at the user's
    adapter.method = name
    _METHODS[name] = Method(name, config, adapter, summary)


def methods() -> dict[str, Method]:
    """All methods by name, in the paper's order."""
    return dict(_METHODS)


def find(name: str) -> Method:
    """The method of that name.

    Raises:
        ValueError: there is none; names the nearest.
    """
    if name not in _METHODS:
        raise ValueError(f"no method {name!r}; {nearest(str(name), _METHODS)}")
    return _METHODS[name]


def of_config(config: Config) -> Method:
    """The method that a configuration object belongs to."""
    for method in _METHODS.values():
        if type(config) is method.config:
            return method
    known = ", ".join(m.config.__name__ for m in _METHODS.values())
    raise ValueError(f"{type(config).__name__} is no method's configuration; known: {known}")
