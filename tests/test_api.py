from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import moetta
from helpers.models import images, small_vit
from helpers.trials import LEARNS_NOTHING, assert_same, portrait
from moetta.methods.sar import SARConfig
from moetta.methods.tent import TentConfig


def test_a_name_and_a_config_object_say_the_same() -> None:
    model = small_vit()
    by_name = moetta.adapt(model, "tent", lr=0.01)
    by_config = moetta.adapt(model, TentConfig(lr=0.01))
    assert by_name.config == by_config.config
    for seed in range(2):
        assert_same(by_name(images(4, seed)), by_config(images(4, seed)))


def test_presets_reach_the_config() -> None:
    assert moetta.adapt(small_vit(), "sar", preset="released").config.predict == "perturbed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "tnet"}, "no method 'tnet'; did you mean 'tent'"),
        ({"method": "zzzzzz"}, "no method 'zzzzzz'; valid: noadapt, tent"),
        ({"method": None}, "no method None"),
        ({"method": TentConfig}, "no method .*TentConfig"),
        ({"method": "tent", "preset": "realeased"}, "no preset 'realeased'.*'released'"),
        ({"method": "tent", "rl": 1}, "no field 'rl'.*'lr'"),
        ({"method": "tent", "lr": -1}, "lr must be above 0"),
        ({"method": TentConfig(), "lr": 1.0}, "not with a config object"),
        ({"method": SARConfig(), "preset": "released"}, "not with a config object"),
        ({"method": moetta.Config()}, "Config is not a method's configuration; known:.*TentConfig"),
        ({"method": "eata"}, "clean source images.*fisher_weight=0"),
        ({"method": "eata", "source": []}, "source is empty"),
        ({"method": "eata", "source": [3]}, "not int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_refusal_leaves_the_model_as_it_was(arguments: dict, message: str, inplace: bool) -> None:
    model = small_vit().train()
    next(model.parameters()).requires_grad_(False)
    before = portrait(model)
    with pytest.raises(ValueError, match=message):
        moetta.adapt(model, **arguments, inplace=inplace)
    assert_same(before, portrait(model))


@pytest.mark.parametrize(
    "method", [m for m in moetta.list_methods() if m not in (*LEARNS_NOTHING, "cotta")]
)
def test_a_model_without_what_the_method_trains_is_described(method: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5))
    before = portrait(model)
    with pytest.raises(ValueError, match="2 Linear, 1 Flatten, 1 ReLU"):
        moetta.adapt(model, method, source=torch.zeros(2, 3, 2, 2), inplace=True)
    assert_same(before, portrait(model))


def test_only_modules_are_adapted() -> None:
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, not str"):
        moetta.adapt("resnet50", "tent")  # type: ignore[arg-type]


def test_a_model_that_cannot_be_copied_can_be_adapted_in_place() -> None:
    model = small_vit()
    model.stream = (i for i in range(3))  # generators cannot be copied
    with pytest.raises(ValueError, match=r"cannot be copied.*inplace=True"):
        moetta.adapt(model, "tent")
    assert torch.isfinite(moetta.adapt(model, "tent", inplace=True)(images(2))).all()


def test_the_methods_are_a_package_and_their_configs_are_at_the_top() -> None:
    assert moetta.list_methods()["mgtta"].adapter is moetta.methods.mgtta.MGTTA
    assert callable(moetta.methods.mgtta.pretrain)
    for method in moetta.list_methods().values():
        assert getattr(moetta, method.config.__name__) is method.config


def test_every_public_name_is_there() -> None:
    for name in moetta.__all__:
        assert getattr(moetta, name) is not None
        assert name in dir(moetta)


@pytest.mark.parametrize("name", ["adapts", "TnetConfig", "__nothing__"])
def test_other_names_are_not(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(moetta, name)


def loaded(code: str) -> set[str]:
    """The heavy packages that some code imports."""
    heavy = "{'torch', 'timm', 'torchvision', 'transformers', 'numpy', 'matplotlib'}"
    code = f"import sys; {code}; print(*{heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert loaded("import moetta; moetta.__version__") == set()


def test_adapting_takes_torch_and_little_else() -> None:
    """torchvision and timm double the time to the first call; both wait until they are needed."""
    assert loaded("import moetta; moetta.adapt; moetta.list_methods()") <= {"torch", "numpy"}
