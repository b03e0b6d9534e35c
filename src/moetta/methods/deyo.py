"""DeYO: trust a prediction that changes when the object's shape is destroyed (Lee et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from moetta.core.config import positive, require
from moetta.core.functional import entropy, log_classes, masked_mean, reliability
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import NormAffineAdapter, SGDConfig
from moetta.core.objective import Objective
from moetta.methods.registry import Citation, Drawn, register
from moetta.nn.destroy import occlude, shuffle_patches, shuffle_pixels


@dataclass(frozen=True)
class DeYOConfig(SGDConfig):
    """DeYO.

    Attributes:
        seed: seed of the shuffles.
        filter_e0: samples with entropy below this share of ln C are considered.
        e0: reference of the weight exp(e0 - H), as a share of ln C.
        plpd: a sample counts if its probability falls by more than this on the destroyed image.
        destroy: how the shape is destroyed.
        patches: patches along each side for destroy="patch".
        occlude: side of the grey square, as a share of the image's side, for destroy="occlusion".
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
        require(0 < self.occlude <= 1, f"occlude must be above 0 and at most 1, got {self.occlude}")


@register(
    "deyo",
    DeYOConfig,
    title="DeYO",
    summary="learns from samples whose label depends on the object's shape",
    group="entropy",
    citation=Citation(
        "Lee, Jonghyun and Jung, Dahuin and Lee, Saehyung and Park, Junsung and Shin, Juhyeon and "
        "Hwang, Uiwon and Yoon, Sungroh",
        "Entropy is not Enough for Test-Time Adaptation: From the Perspective of Disentangled "
        "Factors",
        "ICLR",
        2024,
    ),
    drawn=Drawn("#7a46b8", "#c19cf5", "P", "--"),
    needs="images",
    cost="2 forwards, at most 1 backward",
    paper_row=5,
)
class DeYO(NormAffineAdapter[DeYOConfig]):
    """Entropy weighted by confidence and by the drop on the destroyed image."""

    def objective(self, inputs: Inputs) -> Objective:
        """Weighted entropy of the samples whose label depends on the object's shape."""
        if inputs.images is None:
            raise ValueError(
                "deyo destroys images and needs an image batch [B, C, H, W]; for other inputs use "
                "another method, such as eata or moetta"
            )
        config = self.config
        logits = self.predict(inputs)
        self.predicted(logits)  # a second pass follows
        scale = log_classes(logits)
        entropies = entropy(logits)
        sure = entropies.detach() < config.filter_e0 * scale
        found = Objective(logits, selected=sure, entropy=entropies)
        count = int(sure.sum())
        if count == 0:
            found.skipped = "no sample below the entropy filter"
            return found
        drop = torch.zeros_like(entropies)
        drop[sure] = self._drop(inputs.select(sure), logits.detach()[sure]).to(drop.dtype)
        found.forwards = len(inputs) + count
        found.selected = sure & (drop > config.plpd)
        if not found.selected.any():
            found.skipped = "no sample whose probability falls enough"
            return found
        weight = reliability(entropies, config.e0 * scale) + drop.exp()
        found.losses["entropy"] = masked_mean(weight * entropies, found.selected)
        return found

    def _drop(self, inputs: Inputs, logits: Tensor) -> Tensor:
        """How much of the predicted label's probability the destroyed image loses."""
        images = inputs.images
        assert images is not None
        config, generator = self.config, self.generator()
        if config.destroy == "patch":
            broken = shuffle_patches(images, config.patches, generator, inputs.share)
        elif config.destroy == "pixel":
            broken = shuffle_pixels(images, generator)
        else:
            broken = occlude(images, config.occlude)
        with torch.no_grad():
            after = inputs.with_images(broken).logits(self.model).float().softmax(-1)
        before = logits.float().softmax(-1)
        label = before.argmax(-1, keepdim=True)
        return (before.gather(1, label) - after.gather(1, label)).squeeze(1)
