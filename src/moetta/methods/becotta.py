"""BECoTTA: a mixture of tiny adapters after every block (Lee et al., 2024), for classifiers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moetta.core.adapter import Adapter, Source
from moetta.core.config import Config, positive, require
from moetta.core.functional import entropy, log_classes, masked_mean
from moetta.core.inputs import Inputs
from moetta.core.objective import Objective
from moetta.methods.registry import Citation, Drawn, register
from moetta.nn.blocks import find_blocks
from moetta.nn.bottleneck import BottleneckMixture


@dataclass(frozen=True)
class BECoTTAConfig(Config):
    """BECoTTA.

    Attributes:
        seed: seed of the adapters' initial weights and of the gates' noise.
        lr: learning rate of the Adam optimiser.
        betas: decays of the optimiser's two averages.
        experts: adapters after each block.
        rank: inner width of an adapter.
        top_k: adapters that a sample passes through. With one, the gate's weight is always 1, so
            the gate gets no gradient and noise decides much of the choice, as in the paper.
        routers: gates after each block; if there are several, each sample gets one at random.
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
        require(
            all(0 <= b < 1 for b in self.betas),
            f"betas must be at least 0 and below 1, got {self.betas}",
        )


@register(
    "becotta",
    BECoTTAConfig,
    title="BECoTTA",
    summary="adds a mixture of tiny adapters after every block",
    group="experts",
    citation=Citation(
        "Lee, Daeun and Yoon, Jaehong and Hwang, Sung Ju",
        "BECoTTA: Input-dependent Online Blending of Experts for Continual Test-time Adaptation",
        "ICML",
        2024,
    ),
    drawn=Drawn("#8c3b2a", "#e39683", "p", "--"),
    needs="repeated blocks",
    cost="1 forward, at most 1 backward",
    paper_row=7,
)
class BECoTTA(Adapter[BECoTTAConfig]):
    """Entropy minimisation through adapters; the model itself does not change.

    The adapters start small but not at zero, so the first prediction is not the source model's.
    The gates' noise depends only on the seed and the step, so a paused adapter predicts what a
    learning one would.
    """

    def build(self, source: Source) -> None:
        """Add a mixture after every block."""
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
            self.surgery.replace(block.name, layer)
            self.mixtures[block.name] = layer
        parameters = self.make_trainable(
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
        found = {name: experts for name, experts in chosen.items() if experts is not None}
        return self.whole(found)

    def expert_counts(self) -> dict[str, int]:
        """The number of adapters after each block."""
        return {name: layer.experts for name, layer in self.mixtures.items()}

    def objective(self, inputs: Inputs) -> Objective:
        """The entropy of the sure samples."""
        logits = self.predict(inputs)
        entropies = entropy(logits)
        selected = entropies.detach() < self.config.e0 * log_classes(logits)
        loss = masked_mean(entropies, selected)
        return Objective(logits, {"entropy": loss}, selected, entropies)

    def merge(self) -> nn.Module:
        """The model with its adapters and without noise in the gates.

        Noise belongs to learning; a frozen model should answer the same question the same way.
        Its predictions therefore differ from the adapter's wherever noise decided.
        """
        merged = super().merge()
        for module in merged.modules():
            if isinstance(module, BottleneckMixture):
                module.noisy = False
        return merged
