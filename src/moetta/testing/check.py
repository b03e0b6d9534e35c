"""Put a method, anyone's, through the trials that ours pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from moetta.core.adapter import Adapter
from moetta.methods.registry import Method, find, of_adapter
from moetta.testing.evidence import Broken, difference, portrait
from moetta.testing.models import FAMILIES, Family, call
from moetta.testing.promises import PROMISES, Trial


class BrokenPromises(AssertionError):
    """A method breaks promises; the message lists each with the model and what was seen."""


@dataclass(frozen=True)
class Outcome:
    """What became of one promise on one model.

    Attributes:
        promise: the promise, in words.
        model: the family of models.
        broken: what was seen if the promise was broken, else None.
        refused: the method's message if it refused the model, else None.
    """

    promise: str
    model: str
    broken: str | None = None
    refused: str | None = None


def check_method(
    method: str | Method | type[Adapter],
    models: Iterable[str | Family] | None = None,
    **config: Any,
) -> list[Outcome]:
    """Put a method through the trials that every method of the package passes.

    Args:
        method: a name, ``"package.module:Class"``, an adapter class or a `Method`.
        models: families of models, by name (`FAMILIES` has them) or as `Family`; None is all.
        **config: settings for the trials. With the defaults a careful method may skip small random
            batches; choose settings under which it learns from them.

    Returns:
        What became of each promise on each model. A model that the method refuses with a clear
        `ValueError` is not a broken promise.

    Raises:
        BrokenPromises: the method breaks a promise; the message names it, the model, and what was
            seen.
    """
    found = _method(method)
    outcomes = [o for family in _families(models) for o in _check(Trial(found, family, config))]
    broken = [o for o in outcomes if o.broken is not None]
    if broken:
        lines = [f"- {o.promise}\n  on {o.model}: {o.broken}" for o in broken]
        count = f"{len(broken)} promise{'s' if len(broken) > 1 else ''}"
        raise BrokenPromises(f"method {found.name!r} breaks {count}:\n" + "\n".join(lines))
    return outcomes


def _method(method: str | Method | type[Adapter]) -> Method:
    if isinstance(method, Method):
        return method
    return find(method) if isinstance(method, str) else of_adapter(method)


def _families(models: Iterable[str | Family] | None) -> list[Family]:
    chosen = FAMILIES.values() if models is None else models
    return [model if isinstance(model, Family) else FAMILIES[model] for model in chosen]


def _check(trial: Trial) -> Iterator[Outcome]:
    """Every promise on one family, or the refusal of it."""
    name, model = trial.family.name, trial.family.model()
    before = portrait(model)
    promise = "It adapts every model, or refuses it with a ValueError and leaves it as it was."
    try:
        call(trial.make(model), trial.family.batch())
    except ValueError as refusal:
        broken = difference(portrait(model), before, "the refused model")
        yield Outcome(promise, name, broken=broken, refused=str(refusal))
        return
    except Exception as error:  # whatever a method does wrong is to be reported, not raised
        yield Outcome(promise, name, broken=f"it raised {type(error).__name__}: {error}")
        return
    yield Outcome(promise, name)
    for check in PROMISES:
        broken = None
        try:
            check(trial)
        except Broken as error:
            broken = str(error)
        except Exception as error:
            broken = f"it raised {type(error).__name__}: {error}"
        yield Outcome((check.__doc__ or "").partition("\n")[0], name, broken)
