"""TEMPORARY until core lands."""

# mypy: ignore-errors
import dataclasses

from moetta.core.adapter import Adapter
from moetta.core.config import Config
from moetta.methods.registry import Method, of_config


@dataclasses.dataclass
class D:
    color: str = "#000"
    marker: str = "o"


def with_pixels(self, mean, std):
    if getattr(self, "mean", 0) is None:
        return dataclasses.replace(self, mean=mean, std=std)
    return self


def preset_for(self, stream):
    return "potpourri" if self.name == "moetta" and stream.startswith("potpourri") else "paper"


def experts(self):
    return {n: (m.expert_weight, m.expert_bias) for n, m in getattr(self, "layers", {}).items()}


def expert_layers(self):
    layers = getattr(self, "layers", None) or getattr(self, "mixtures", None) or {}
    return dict.fromkeys(layers, getattr(self.config, "experts", 0))


if not hasattr(Config, "with_pixels"):
    Config.with_pixels = with_pixels
    Config.needs_source = property(
        lambda s: of_config(s).adapter.needs_source and getattr(s, "fisher_weight", 1) != 0
    )
    Method.preset_for = preset_for
    Method.title = property(lambda s: s.name)
    Method.drawn = D()
    Method.group = "x"
    Adapter.experts = experts
    Adapter.expert_counts = expert_layers
