"""The check can fail: a method broken on purpose for each promise, and what is said about it."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch

import moetta
from helpers.models import VIT
from moetta import Objective, Step
from moetta.core.functional import entropy
from moetta.methods import find, registry
from moetta.methods.tent import Tent
from moetta.testing import FAMILIES, BrokenPromises, Family, check_method
from moetta.testing.evidence import difference


@dataclass(frozen=True)
class TrialConfig(moetta.TentConfig):
    """Settings for a method that is broken on purpose."""

    lr: float = 0.01


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))


def registered(adapter: type[moetta.Adapter]) -> type[moetta.Adapter]:
    """The class as a method of its name."""
    facts = {"title": "Trial", "summary": "a trial", "group": "entropy"}
    return moetta.register(adapter.__name__.lower(), TrialConfig, **facts)(adapter)


class Loud(Tent):
    """Returns logits for two classes of five."""

    def learn(self, inputs):
        step = super().learn(inputs)
        step.logits = step.logits[:, :2]
        return step


class Miscounting(Tent):
    def learn(self, inputs):
        step = super().learn(inputs)
        step.forwards = 0
        return step


class Idle(Tent):
    """Says that it learnt, and did not."""

    def descend(self, loss):
        return None


class Hidden(Tent):
    """Keeps a value that neither reset nor a saved state knows of."""

    calls = 0

    def objective(self, inputs):
        self.calls += 1
        found = super().objective(inputs)
        return Objective(found.logits, {"entropy": found.losses["entropy"] * self.calls})


class Hasty(Tent):
    """Changes its state before the model has accepted the batch."""

    def build(self, source):
        super().build(source)
        self.running["seen"] = torch.zeros(())

    def objective(self, inputs):
        self.running["seen"] = self.running["seen"] + 1
        return super().objective(inputs)


class Picky(Tent):
    def objective(self, inputs):
        if len(inputs) == 1:
            raise ValueError("one image is not enough")
        return super().objective(inputs)


class Stubborn(Tent):
    """Steps, then says that it skipped."""

    def learn(self, inputs):
        step = super().learn(inputs)
        step.skipped, step.backwards = "no sample selected", 0
        return step


class Careless(Tent):
    """Steps by hand without looking at the numbers."""

    def learn(self, inputs):
        logits = self.predict(inputs)
        loss = entropy(logits).mean()
        grads = torch.autograd.grad(loss, list(self.trained.values()))
        self.step_along(list(grads))
        return Step(logits, len(inputs), len(inputs), losses={"entropy": loss})


class Moody(Tent):
    """Gives other numbers under inference mode."""

    def __call__(self, *args, **kwargs):
        logits = super().__call__(*args, **kwargs)
        return logits + 1 if torch.is_inference_mode_enabled() else logits


class Restless(Tent):
    """Learns while it is paused."""

    def predict(self, inputs):
        with torch.no_grad():
            next(iter(self.trained.values())).mul_(0.99)
        return super().predict(inputs)


class Messy(Tent):
    """Leaves a layer behind in the user's model."""

    def build(self, source):
        super().build(source)
        self.network.left_behind = torch.nn.Identity()


class Attached(Tent):
    """Its merged model is the adapted one itself."""

    def merge(self):
        return self.network.requires_grad_(False)


class Fickle(Tent):
    """Announces logits that it does not return."""

    def objective(self, inputs):
        found = super().objective(inputs)
        self.predicted(found.logits + 1)
        return found


class Gambling(Tent):
    """Draws from torch's global generator."""

    def objective(self, inputs):
        found = super().objective(inputs)
        noise = torch.rand(())
        return Objective(found.logits, {"entropy": found.losses["entropy"] * noise})


class Hoarding(Tent):
    """Keeps something of every batch."""

    def after_step(self, objective):
        self.running[f"batch{self.steps}"] = objective.logits.detach()


class Crashing(Tent):
    def build(self, source):
        raise KeyError("blocks")


class Spoiling(Tent):
    """Refuses a model after it has changed it."""

    def __init__(self, model, config, source=None, inplace=False):
        next(model.parameters()).data.mul_(2)
        raise ValueError("not this one")


BROKEN = [
    (Loud, "returns finite, detached logits", r"the logits are \(4, 2\), not \(4, 5\)"),
    (Miscounting, "reports what it did", "last.forwards is 0 for a batch of 4"),
    (Idle, "reports what it did", "backwards are counted, but no trained parameter moved"),
    (Hidden, "reset\\(\\) restores", "the logits of step 2 differs by up to"),
    (Hidden, "loaded into a fresh adapter, continues to the bit", "differs by up to"),
    (Hasty, "A bad batch raises ValueError and changes nothing", "running.seen differs by up to 1"),
    (Picky, "Batches of one", "raised ValueError: one image is not enough"),
    (Stubborn, "A batch that is skipped", "was skipped, but the state: param.* differs"),
    (Careless, "A batch that is skipped", "the state is not finite: param"),
    (Moody, "Under no_grad and inference_mode", "the logits of step 2 differs by up to 1"),
    (Restless, "Within paused", "the second paused prediction differs"),
    (Messy, "unwrap\\(\\) gives back", "the unwrapped model: .*left_behind"),
    (
        Attached,
        "merge\\(\\) returns a separate, frozen model",
        "differs by|no gradient",
    ),
    (Fickle, "on_prediction is called exactly once", "against what the call returned, differs"),
    (Gambling, "Random draws depend on the seed", "moved torch's global random generator"),
    (Hoarding, "is as large as after a few", "only one has running.batch"),
    (Crashing, "or refuses it with a ValueError", "it raised KeyError: 'blocks'"),
    (Spoiling, "leaves it as it was", "the refused model: values: .* differs"),
]


@pytest.mark.parametrize(
    ("adapter", "promise", "seen"),
    BROKEN,
    ids=[adapter.__name__ for adapter, *_ in BROKEN],
)
def test_a_broken_promise_is_named_with_the_model_and_what_was_seen(
    adapter: type[moetta.Adapter], promise: str, seen: str
) -> None:
    message = f"- .*{promise}.*\n  on timm_vit: .*({seen})"
    with pytest.raises(BrokenPromises, match=message) as caught:
        check_method(registered(adapter), ["timm_vit"])
    assert str(caught.value).startswith(f"method '{adapter.__name__.lower()}' breaks ")


def test_an_honest_method_passes() -> None:
    class Honest(Tent):
        pass

    outcomes = check_method(registered(Honest), ["timm_vit", "timm_resnet"])
    assert len(outcomes) == 2 * 14
    assert {outcome.model for outcome in outcomes} == {"timm_vit", "timm_resnet"}
    assert not any(outcome.broken or outcome.refused for outcome in outcomes)


def test_a_method_is_given_in_any_form() -> None:
    for method in ("tent", find("tent"), Tent, "moetta.methods.tent:Tent"):
        assert check_method(method, ["timm_vit"])
    with pytest.raises(ValueError, match="no method 'tnet'"):
        check_method("tnet")


def test_a_refusal_is_an_outcome() -> None:
    (outcome,) = check_method("deyo", ["hf_bert"])
    assert "needs an image batch" in outcome.refused
    assert outcome.broken is None


def test_a_family_of_the_users_own() -> None:
    mine = Family("mine", lambda: copy.deepcopy(VIT.shared()))
    assert {outcome.model for outcome in check_method("tent", [mine])} == {"mine"}


def test_families_are_the_same_every_time() -> None:
    for family in FAMILIES.values():
        assert difference(family.model().state_dict(), family.shared().state_dict(), "") is None
        assert family.model() is not family.shared()
