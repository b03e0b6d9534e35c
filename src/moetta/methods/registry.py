"""All methods by name: ours, those of other packages, and the user's."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar, get_args

from moetta.core.adapter import Adapter
from moetta.core.config import Config
from moetta.suggest import nearest

ENTRY_POINTS = "moetta.methods"

Group = Literal["baseline", "entropy", "consistency", "teacher", "resets", "no-gradient", "experts"]
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True)
class Citation:
    """The paper that describes a method.

    Attributes:
        authors: as BibTeX wants them: "Doe, Jane and Roe, Richard"; empty if we do not know them.
        title: the paper's title.
        venue: where it was published.
        year: when.
    """

    authors: str
    title: str
    venue: str
    year: int

    def __str__(self) -> str:
        if not self.authors:
            return f"{self.title}, {self.venue} {self.year}"
        first, *others = self.authors.split(" and ")
        return f"{first.partition(',')[0]}{' et al.' if others else ''}, {self.venue} {self.year}"

    def bibtex(self, key: str) -> str:
        """The BibTeX entry."""
        authors = f"  author = {{{self.authors}}},\n" if self.authors else ""
        return (
            f"@inproceedings{{{key},\n{authors}"
            f"  title = {{{{{self.title}}}}},\n  booktitle = {{{self.venue}}},\n"
            f"  year = {{{self.year}}},\n}}"
        )


@dataclass(frozen=True)
class Drawn:
    """How a method is drawn in plots: plain data, as it is stored with results.

    Attributes:
        light: colour on a light background, at least 3:1 against white.
        dark: colour on a dark background.
        marker: matplotlib's letter for the marker.
        dash: "-", "--" or ":".
    """

    light: str
    dark: str
    marker: str = "o"
    dash: Literal["-", "--", ":"] = "-"


@dataclass(frozen=True)
class Method:
    """Everything there is to know about a method.

    Attributes:
        name: what users call it.
        config: its configuration class.
        adapter: its adapter class.
        title: its name in tables and plots.
        summary: one line for listings.
        group: the family it belongs to, one of `GROUPS`.
        citation: the paper that describes it, if there is one.
        drawn: how it is drawn in plots; None takes a free colour.
        preset_for: the preset that suits a stream, given the stream's name.
        needs: what it needs beyond a model with norm layers, in a few words.
        cost: passes per batch, in a few words.
        paper_row: its row in the MoETTA paper's tables, from 0; None if it is not there.
    """

    name: str
    config: type[Config]
    adapter: type[Adapter]
    title: str
    summary: str
    group: Group
    citation: Citation | None = None
    drawn: Drawn | None = None
    preset_for: Callable[[str], str] = lambda stream: "paper"
    needs: str = ""
    cost: str = ""
    paper_row: int | None = None

    @property
    def in_paper(self) -> bool:
        """Whether the MoETTA paper compares it."""
        return self.paper_row is not None

    @property
    def needs_source(self) -> bool:
        """Whether it needs source images with its default settings."""
        return self.config().needs_source

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain JSON values, for results that are read without torch."""
        return {
            "name": self.name,
            "title": self.title,
            "summary": self.summary,
            "group": self.group,
            "citation": None if self.citation is None else asdict(self.citation),
            "drawn": None if self.drawn is None else asdict(self.drawn),
            "needs_source": self.needs_source,
            "needs": self.needs,
            "cost": self.cost,
            "paper_row": self.paper_row,
        }


_METHODS: dict[str, Method] = {}

A = TypeVar("A", bound=type[Adapter[Any]])


def register(
    name: str,
    config: type[Config],
    *,
    title: str,
    summary: str,
    group: Group,
    citation: Citation | None = None,
    drawn: Drawn | None = None,
    preset_for: Callable[[str], str] = lambda stream: "paper",
    needs: str = "",
    cost: str = "",
    paper_row: int | None = None,
) -> Callable[[A], A]:
    """Register an adapter class as a method; a class decorator. `Method` explains the arguments.

    Raises:
        ValueError: the name is taken, the group is unknown, or the configuration is not a frozen,
            documented dataclass with a default for every field.
    """

    def add(adapter: A) -> A:
        known = _METHODS.get(name)
        # A file that runs as a script and is then imported registers its method twice.
        if known is not None and _origin(known.adapter) != _origin(adapter):
            raise ValueError(f"method {name!r} is already registered by {known.adapter.__module__}")
        if group not in GROUPS:
            raise ValueError(f"no group {group!r} of methods; {nearest(group, GROUPS)}")
        check_config(config)
        adapter.method = name
        _METHODS[name] = Method(
            name, config, adapter, title, summary, group, citation, drawn, preset_for, needs, cost,
            paper_row,
        )  # fmt: skip
        return adapter

    return add


def _origin(adapter: type[Adapter]) -> tuple[str | None, str]:
    module = sys.modules.get(adapter.__module__)
    return getattr(module, "__file__", None), adapter.__qualname__


def check_config(config: type[Config]) -> None:
    """Refuse a configuration class that would break what all methods promise."""
    frozen = is_dataclass(config) and config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if not frozen or not issubclass(config, Config):
        raise ValueError(f"{config.__name__} must be a frozen dataclass that extends Config")
    documented = config.field_docs()
    for field in fields(config):
        if field.name not in documented:
            raise ValueError(f"{config.__name__} does not document its field {field.name!r}")
    for preset in ("paper", *config.presets):
        config.preset(preset)  # an invalid preset fails here, not later for the user


@cache
def _load_entry_points() -> None:
    """Import what installed packages declare as methods."""
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as error:  # another package's fault must not stop ours
            warnings.warn(
                f"method {entry.name!r} ({entry.value}) could not be loaded: {error}", stacklevel=2
            )


def list_methods() -> dict[str, Method]:
    """All methods by name: the paper's in its order, then the others as they were registered."""
    _load_entry_points()
    last = len(_METHODS)
    order = sorted(_METHODS.values(), key=lambda m: last if m.paper_row is None else m.paper_row)
    return {method.name: method for method in order}


def find(name: str) -> Method:
    """The method of that name, or the registered adapter class at ``package.module:Class``.

    Raises:
        ValueError: there is none; the message names the nearest.
    """
    if name in _METHODS:
        return _METHODS[name]
    if isinstance(name, str) and ":" in name:
        return of_adapter(_import(name))
    known = list_methods()
    if name not in known:
        raise ValueError(f"no method {name!r}; {nearest(str(name), known)}")
    return known[name]


def of_config(config: Config) -> Method:
    """The method that a configuration object belongs to."""
    known = list_methods().values()
    for method in known:
        if type(config) is method.config:
            return method
    names = ", ".join(method.config.__name__ for method in known)
    raise ValueError(f"{type(config).__name__} is not a method's configuration; known: {names}")


def of_adapter(adapter: Any) -> Method:
    """The method that an adapter class is registered as."""
    for method in _METHODS.values():
        if method.adapter is adapter:
            return method
    name = getattr(adapter, "__qualname__", repr(adapter))
    raise ValueError(f"{name} is not a registered method; decorate the class with @register(...)")


def _import(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if "" not in sys.path:  # an installed command does not search the current folder
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"method {path!r} could not be imported ({error}); run from the folder that holds it, "
            "or set PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        raise ValueError(f"{module_name} has no class {attribute!r}; {nearest(attribute, names)}")
    return getattr(module, attribute)
