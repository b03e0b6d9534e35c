"""DeYO: trust a prediction that changes when the object's shape is destroyed (Lee et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from moetta.core.adapter import Step
from moetta.core.config import positive, require
from moetta.core.functional import entropy, log_classes, masked_mean, reliability
from moetta.core.inputs import Inputs
from moetta.methods.norm_affine import NormAffineAdapter, SGDConfig
from moetta.methods.registry import register
from moetta.nn.destroy import occlude, shuffle_patches, shuffle_pixels


@dataclass(frozen=True)
class DeYOConfig(SGDConfig):
    """DeYO.

    Attributes:
        seed: seed of the shuffles.
        lr: learning rate.
        momentum: momentum of the SGD.
        filter_e0: samples with entropy below this share of ln C are looked at.
        e0: reference of the weight exp(e0 - H), as a share of ln C.
        plpd: a sample counts if its probability falls by more than this on the destroyed image.
        destroy: how the shape is destroyed.
        patches: patches along each side for destroy="patch".
        occlude: side of the grey square as a share of the image's, for destroy="occlusion".
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "released": {"filter_e0": 0.4, "e0": 0.5, "plpd": 0.5}
    }

    lr: float = 5e-5
    filter_e0: float = 0.5
    e0: float = 0.4
    plpd: float = 0.2
    destroy: Literal["patch", "pixel", "occlusion"] = "patch"
    patches: int = 4
    occlude: float = 0.5

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "filter_e0", "e0", "patches")
        require(0 < self.occlude <= 1, f"occlude must be in (0, 1], not {self.occlude}")


class DeYO(NormAffineAdapter):
    """Entropy weighted by confidence and by the drop on the destroyed image."""

    def learn(self, inputs: Inputs) -> Step:
        """One step on the samples whose label hangs on the object's shape."""
        if inputs.images is None:
            raise ValueError(
                "deyo destroys pictures and needs an image batch [B, C, H, W]; for other inputs "
                "use another method, such as eata or moetta"
            )
        config, size = self.config, len(inputs)
        logits = inputs.logits(self.model)
        scale = log_classes(logits)
        entropies = entropy(logits)
        sure = entropies.detach() < config.filter_e0 * scale
        step = Step(logits, forwards=size, entropy=entropies, selected=sure)
        count = int(sure.sum())
        if count == 0:
            step.skipped = "no sample below the entropy filter"
            return step
        drop = torch.zeros_like(entropies)
        drop[sure] = self._drop(inputs.select(sure), logits.detach()[sure]).to(drop.dtype)
        step.forwards += count
        step.selected = selected = sure & (drop > config.plpd)
        if not selected.any():
            step.skipped = "no sample whose probability falls enough"
            return step
        weight = reliability(entropies, config.e0 * scale) + drop.exp()
        loss = masked_mean(weight * entropies, selected)
        step.losses["entropy"] = loss
        step.skipped = self.descend(loss)
        step.backwards = 0 if step.skipped else int(selected.sum())
        return step

    def _drop(self, inputs: Inputs, logits: Tensor) -> Tensor:
        """How much of the predicted label's probability the destroyed image loses."""
        images = inputs.images
        assert images is not None
        config, generator = self.config, self.generator()
        if config.destroy == "patch":
            broken = shuffle_patches(images, config.patches, generator)
        elif config.destroy == "pixel":
            broken = shuffle_pixels(images, generator)
        else:
            broken = occlude(images, config.occlude)
        with torch.no_grad():
            after = inputs.with_images(broken).logits(self.model).float().softmax(-1)
        before = logits.float().softmax(-1)
        label = before.argmax(-1, keepdim=True)
        return (before.gather(1, label) - after.gather(1, label)).squeeze(1)


register("deyo", DeYOConfig, DeYO, "samples whose label depends on the object's shape")
