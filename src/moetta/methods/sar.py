"""SAR: reliable samples, sharpness-aware steps, recovery from collapse (Niu et al., 2023)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from moetta.core.adapter import Source
from moetta.core.config import positive, share
from moetta.core.functional import UNCERTAINTIES, log_classes, masked_mean
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import NormAffineAdapter, SGDConfig
from moetta.core.objective import Step
from moetta.methods.registry import Citation, Drawn, register
from moetta.nn.blocks import find_blocks
from moetta.nn.norms import Norm
from moetta.nn.sam import perturbed

# SAR published its rule "leave out the last blocks" as layer names: blocks 9 to 11 and the final
# norm of timm's ViT-B, the fourth stage of a ResNet. The names are kept as published, since the
# published results depend on them: a ViT-L loses the same three of its 24 blocks (42 of 49 layers
# are trained), a ConvNeXt-B the same three of its longest stage (38 of 41).
PUBLISHED_RULE = re.compile(r"layer4|blocks\.(9|10|11)|norm\.|^norm$")
# A model has such names, and the rule applies, if one of its norm layers has a name like this.
PUBLISHED_NAMES = re.compile(r"layer\d|blocks\.\d|^norm$")


@dataclass(frozen=True)
class SARConfig(SGDConfig):
    """SAR.

    Attributes:
        seed: not used.
        e0: entropies below this share of ln C are reliable.
        rho: radius of the sharpness-aware perturbation.
        decay: how much of the average loss a step keeps.
        recover_below: an average loss below this means collapse: start again from the source model.
        objective: the measure of uncertainty to minimise: the entropy of the prediction, or COME's
            entropy of an opinion ("come").
        second: which samples the second filter looks at: those the first one kept, or the whole
            batch.
        predict: which logits are returned: the first pass's, or those at the perturbed weights.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "released": {"second": "batch", "predict": "perturbed"}
    }

    lr: float = 5e-4
    e0: float = 0.4
    rho: float = 0.05
    decay: float = 0.9
    recover_below: float = 0.2
    objective: Literal["entropy", "come"] = "entropy"
    second: Literal["kept", "batch"] = "kept"
    predict: Literal["first", "perturbed"] = "first"

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "e0", "rho")
        share(self, "decay")


def early(network: nn.Module, norms: list[Norm]) -> list[Norm]:
    """All norm layers but the last ones.

    If the model has the names the published rule was written for, that rule decides. Otherwise the
    last quarter of the blocks and all after them are left out, which is the same for a ViT-B.
    """
    if any(PUBLISHED_NAMES.search(norm.name) for norm in norms):
        return [norm for norm in norms if not PUBLISHED_RULE.search(norm.name)]
    try:
        blocks = find_blocks(network)
    except ValueError:
        return norms
    last = blocks[len(blocks) - len(blocks) // 4 - 1]
    inside = [i for i, norm in enumerate(norms) if norm.name.startswith(f"{last.name}.")]
    return norms[: inside[-1] + 1]


@register(
    "sar",
    SARConfig,
    title="SAR",
    summary="learns from reliable samples towards flat minima and recovers from collapse",
    group="entropy",
    citation=Citation(
        "Niu, Shuaicheng and Wu, Jiaxiang and Zhang, Yifan and Wen, Zhiquan and Chen, Yaofo and "
        "Zhao, Peilin and Tan, Mingkui",
        "Towards Stable Test-Time Adaptation in Dynamic Wild World",
        "ICLR",
        2023,
    ),
    drawn=Drawn("#8a6a00", "#dcbf3d", "D"),
    cost="2 forwards, at most 2 backwards",
    paper_row=4,
)
class SAR(NormAffineAdapter[SARConfig]):
    """Two passes per step: find the sharpest nearby point, learn from the gradient there."""

    over_ranks = True

    def choose(self, norms: list[Norm]) -> list[Norm]:
        """All but the last blocks."""
        return early(self.network, norms)

    def build(self, source: Source) -> None:
        """Train the early norm layers."""
        super().build(source)
        self.running["average_loss"] = None

    def learn(self, inputs: Inputs) -> Step:
        """One sharpness-aware step on the reliable samples."""
        config, size = self.config, len(inputs)
        logits = self.predict(inputs)
        if config.predict == "first":
            self.predicted(logits)
        threshold = config.e0 * log_classes(logits)
        uncertainty = UNCERTAINTIES[config.objective]
        entropies = uncertainty(logits)
        reliable = entropies.detach() < threshold
        loss = masked_mean(entropies, reliable)
        step = Step(logits, forwards=size, selected=reliable, losses={"entropy": loss})
        if not reliable.any():
            step.skipped = "no sample selected"
            return step
        grads = self.gradients(loss)
        if grads is None:
            step.skipped = "non-finite loss or gradient"
            return step
        step.backwards = int(reliable.sum())
        with perturbed(list(self.trained.values()), grads, config.rho):
            sharp_logits = self.predict(inputs)
            step.forwards += size
            if config.predict == "perturbed":
                self.predicted(sharp_logits)
            sharp = uncertainty(sharp_logits)
            second = sharp.detach() < threshold
            if config.second == "kept":
                second &= reliable
            sharp_loss = masked_mean(sharp, second)
            sharp_grads = self.gradients(sharp_loss) if second.any() else None
        if config.predict == "perturbed":
            step.logits = sharp_logits
        step.losses["sharp"] = sharp_loss
        if sharp_grads is None:
            empty = not second.any()
            step.skipped = (
                "no sample selected at the perturbed weights"
                if empty
                else "non-finite loss or gradient at the perturbed weights"
            )
            return step
        step.backwards += int(second.sum())
        self.step_along(sharp_grads)
        self._recover(sharp_loss.detach())
        return step

    def _recover(self, loss: Tensor) -> None:
        average = self.running["average_loss"]
        keep = self.config.decay
        average = loss if average is None else keep * average + (1 - keep) * loss
        self.running["average_loss"] = average
        if average < self.config.recover_below:
            self.start_over()
