from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import moetta
from helpers.models import images, small_vit
from moetta import Adapter, Config
from moetta.methods import GROUPS, find, of_adapter, of_config, register, registry
from moetta.methods.registry import Citation


@dataclass(frozen=True)
class Documented(Config):
    """A config.

    Attributes:
        strength: how much.
    """

    strength: float = 1.0


class Nothing(Adapter):
    pass


def add(name, config=Documented, adapter=Nothing, group="entropy", **facts):
    return register(name, config, title="New", summary="a trial", group=group, **facts)(adapter)


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))


def test_a_registered_method_can_be_used_everywhere() -> None:
    add("new")
    assert list(moetta.list_methods())[-1] == "new"
    assert find("new").adapter is Nothing
    assert of_config(Documented()) is of_adapter(Nothing) is find("new")
    assert Nothing.method == "new"


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match=r"'tent' is already registered by moetta.methods.tent"):
        add("tent")


def test_the_same_class_may_be_registered_again() -> None:
    add("new")
    add("new")
    assert find("new").adapter is Nothing


def test_a_group_is_one_of_a_few() -> None:
    with pytest.raises(ValueError, match=r"no group 'entropi'.*did you mean 'entropy'"):
        add("new", group="entropi")


def test_configs_must_be_frozen() -> None:
    @dataclass
    class Thawed:
        """Not a Config.

        Attributes:
            seed: one.
        """

        seed: int = 0

    with pytest.raises(ValueError, match="must be a frozen dataclass that extends Config"):
        add("new", Thawed)


def test_every_field_must_be_documented() -> None:
    @dataclass(frozen=True)
    class Secretive(Config):
        """Says nothing."""

        strength: float = 1.0

    with pytest.raises(ValueError, match="does not document its field 'strength'"):
        add("new", Secretive)
    assert "new" not in moetta.list_methods()


def test_inherited_documentation_counts() -> None:
    @dataclass(frozen=True)
    class Heir(Documented):
        """Another default."""

        strength: float = 2.0

    add("new", Heir)
    docs = Heir.field_docs()
    assert docs["seed"] == "seed of the method's random draws."
    assert docs["strength"] == "how much."


def test_a_broken_preset_fails_at_registration() -> None:
    @dataclass(frozen=True)
    class Broken(Documented):
        """A config."""

        presets = {"odd": {"weight": 1}}  # noqa: RUF012

    with pytest.raises(TypeError, match="weight"):
        add("new", Broken)
    assert "new" not in moetta.list_methods()


def test_the_listing_is_a_copy() -> None:
    moetta.list_methods().clear()
    assert "tent" in moetta.list_methods()


def test_methods_are_found_by_name_by_config_and_by_class() -> None:
    for name, method in moetta.list_methods().items():
        assert find(name) is of_config(method.config()) is of_adapter(method.adapter) is method
        assert method.adapter.method == name


def test_the_papers_nine_come_first_in_its_order() -> None:
    order = ["noadapt", "tent", "eata", "cotta", "sar", "deyo", "mgtta", "becotta", "moetta"]
    add("new")
    listed = moetta.list_methods()
    assert list(listed)[:9] == order
    assert [name for name, method in listed.items() if method.in_paper] == order


@pytest.mark.parametrize("method", moetta.list_methods().values(), ids=lambda m: m.name)
def test_every_method_says_all_there_is_to_know(method: moetta.Method) -> None:
    assert method.title
    assert method.summary
    assert method.cost
    assert method.group in GROUPS
    assert method.preset_for("classical") in ("paper", *method.config.presets)
    facts = json.loads(json.dumps(method.to_dict()))
    assert facts["name"] == method.name
    assert facts["needs_source"] == method.config().needs_source
    assert method.drawn is not None
    assert (method.citation is None) == (method.name in ("noadapt", "moetta_plus"))


def test_colours_and_markers_differ() -> None:
    drawn = [m.drawn for m in moetta.list_methods().values() if m.drawn is not None]
    for part in ("light", "dark"):
        assert len({getattr(d, part) for d in drawn}) == len(drawn), part
    paper = [m.drawn for m in moetta.list_methods().values() if m.in_paper and m.drawn is not None]
    assert len({d.marker for d in paper}) == len(paper)  # there are not markers enough for all


def test_a_stream_may_prefer_a_preset() -> None:
    prefers = find("moetta").preset_for
    assert [prefers(s) for s in ("classical", "potpourri", "potpourri+", "cifar10-c")] == [
        "paper", "potpourri", "potpourri", "paper",
    ]  # fmt: skip


def test_a_citation_in_short_and_as_bibtex() -> None:
    citation = find("tent").citation
    assert str(citation) == "Wang et al., ICLR 2021"
    assert citation.bibtex("tent").startswith("@inproceedings{tent,\n  author = {Wang, Dequan and ")
    assert "title = {{Tent: Fully" in citation.bibtex("tent")
    nobody = Citation("", "A title", "preprint", 2026)
    assert str(nobody) == "A title, preprint 2026"
    assert "author" not in nobody.bibtex("x")


OUTSIDE = """
from dataclasses import dataclass
import moetta
from moetta.core.functional import entropy

@dataclass(frozen=True)
class MineConfig(moetta.SGDConfig):
    \"\"\"Mine.\"\"\"

@moetta.register("mine", MineConfig, title="Mine", summary="a trial", group="entropy")
class Mine(moetta.NormAffineAdapter[MineConfig]):
    def objective(self, inputs):
        logits = self.predict(inputs)
        return moetta.Objective(logits, {"entropy": entropy(logits).mean()})

class Unregistered(moetta.Adapter):
    pass
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module outside the package that defines a method."""
    (tmp_path / "outside_method.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "outside_method"
    sys.modules.pop("outside_method", None)


def test_a_class_outside_the_package_is_found_by_its_path(outside: str) -> None:
    method = find(f"{outside}:Mine")
    assert (method.name, method.title) == ("mine", "Mine")
    assert find("mine") is find(f"{outside}:Mine") is method
    assert moetta.adapt(small_vit(), f"{outside}:Mine")(images(2)).shape == (2, 5)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Mine", "could not be imported.*set PYTHONPATH"),
        ("outside_method:Mime", "has no class 'Mime'; did you mean 'Mine'"),
        ("outside_method:Unregistered", "Unregistered is not a registered method.*@register"),
    ],
)
def test_a_wrong_path_is_refused(path: str, message: str, outside: str) -> None:
    with pytest.raises(ValueError, match=message):
        find(path)


def test_installed_packages_add_methods(outside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def declared(group: str) -> list[EntryPoint]:
        assert group == "moetta.methods"
        return [
            EntryPoint("mine", f"{outside}:Mine", group),
            EntryPoint("gone", "gone:Gone", group),
        ]

    monkeypatch.setattr(registry, "entry_points", declared)
    registry._load_entry_points.cache_clear()
    try:
        with pytest.warns(match="'gone' .* could not be loaded: No module named 'gone'"):
            assert find("mine").title == "Mine"
        assert "mine" in moetta.list_methods()
    finally:
        registry._load_entry_points.cache_clear()
