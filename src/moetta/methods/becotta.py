"""BECoTTA: a mixture of tiny adapters behind every block (Lee et al., 2024), for classifiers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moetta.core.adapter import Adapter, Source, Step
from moetta.core.config import Config, positive, require
from moetta.core.functional import entropy, log_classes, masked_mean
from moetta.core.inputs import Inputs
from moetta.methods.registry import register
from moetta.nn.blocks import find_blocks
from moetta.nn.bottleneck import BottleneckMixture


@dataclass(frozen=True)
class BECoTTAConfig(Config):
    """BECoTTA.

    Attributes:
        seed: seed of the adapters' start and of the gates' noise.
        lr: learning rate of the Adam optimiser.
        betas: decays of its two averages.
        experts: adapters behind each block.
        rank: inner width of an adapter.
        top_k: adapters that a sample goes through. With one, the gate's weight is always 1, so
            the gate gets no gradient and noise decides much of the choice, as in the paper.
        routers: gates behind each block; of several, each sample gets one at random.
        e0: entropies below this share of ln C are learnt from.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    experts: int = 6
    rank: int = 1
    top_k: int = 1
    routers: int = 1
    e0: float = 0.4

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "lr", "experts", "rank", "top_k", "routers", "e0")
        require(
            self.top_k <= self.experts,
            f"top_k ({self.top_k}) cannot exceed the number of experts ({self.experts})",
        )
        require(all(0 <= b < 1 for b in self.betas), f"betas must be in [0, 1), not {self.betas}")


class BECoTTA(Adapter):
    """Entropy minimisation through adapters; the model itself stays as it is.

    The adapters start small but not at zero, so the first prediction is not the source model's.
    The gates' noise is the same for the same step: a paused prediction is the one that learning
    would have returned.
    """

    def build(self, source: Source) -> None:
        """Put a mixture behind every block."""
        config = self.config
        self._seed = torch.zeros((), dtype=torch.int64)  # one for all layers; set at each step
        start = self.generator(1, device="cpu")
        self.mixtures: dict[str, BottleneckMixture] = {}
        for index, block in enumerate(find_blocks(self.network)):
            layer = BottleneckMixture(
                block,
                config.experts,
                config.rank,
                config.top_k,
                config.routers,
                index,
                self._seed,
                start,
            )
            self._surgery.replace(block.name, layer)
            self.mixtures[block.name] = layer
        parameters = self.train(
            (f"{name}.{key}", parameter)
            for name, layer in self.mixtures.items()
            for key, parameter in layer.named_parameters(recurse=False)
        )
        self.optimizer = torch.optim.Adam(parameters, lr=config.lr, betas=config.betas)

    @property
    def activated_parameters(self) -> int:
        """One gate and the chosen adapters of every block."""
        return sum(layer.activated_parameters for layer in self.mixtures.values())

    def predict(self, inputs: Inputs) -> Tensor:
        """Predict with this step's noise."""
        self._seed.fill_(self.generator().initial_seed() % (1 << 62))
        return inputs.logits(self.model)

    def routing(self, samples: int) -> dict[str, Tensor]:
        """Adapters of each sample [B, k], by block."""
        chosen = {name: layer.chosen for name, layer in self.mixtures.items()}
        return {name: experts for name, experts in chosen.items() if experts is not None}

    def learn(self, inputs: Inputs) -> Step:
        """One step down the entropy of the sure samples."""
        logits = self.predict(inputs)
        entropies = entropy(logits)
        selected = entropies.detach() < self.config.e0 * log_classes(logits)
        count = int(selected.sum())
        loss = masked_mean(entropies, selected)
        routing = self.routing(len(inputs))
        skipped = self.descend(loss) if count else "no sample selected"
        return Step(
            logits,
            forwards=len(inputs),
            backwards=0 if skipped else count,
            entropy=entropies,
            selected=selected,
            losses={"entropy": loss},
            routing=routing,
            skipped=skipped,
        )

    def merge(self) -> nn.Module:
        """The model with its adapters and without noise in the gates.

        Noise belongs to learning; a frozen model should answer the same question the same way.
        Its predictions therefore differ from the adapter's own wherever noise had the say.
        """
        merged = super().merge()
        for module in merged.modules():
            if isinstance(module, BottleneckMixture):
                module.noisy = False
        return merged


register("becotta", BECoTTAConfig, BECoTTA, "a mixture of tiny adapters behind every block")
