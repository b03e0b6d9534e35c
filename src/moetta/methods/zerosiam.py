"""ZeroSiam: a predictor before the classifier makes constant answers unattractive (Chen et al.)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from moetta.core.config import require
from moetta.core.functional import entropy
from moetta.core.inputs import Inputs
from moetta.core.objective import Objective, Step
from moetta.core.predictor import PredictorAdapter, PredictorConfig
from moetta.methods.registry import Citation, Drawn, register


@dataclass(frozen=True)
class ZeroSiamConfig(PredictorConfig):
    """ZeroSiam. The rates are the authors' for a ViT-B and batches of 64; presets have others.

    Attributes:
        lr: learning rate of the norm layers, for batches of 64.
        predictor_lr: learning rate of the predictor, for batches of 64.
        seed: not used.
        alignment: weight of the divergence between the two branches (alpha).
        scale_rates: change both rates in proportion to the batch size, and double those of a
            single image, as the authors do.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "vit_small": {"lr": 1e-3, "predictor_lr": 1e-2},
        "convnext_tiny": {"lr": 2.5e-4, "predictor_lr": 2.5e-3},
        "swin_tiny": {"lr": 5e-4, "predictor_lr": 2.5e-3},
        "resnet50_gn": {"lr": 2.5e-3, "predictor_lr": 2.5e-2},
    }

    lr: float = 5e-3
    predictor_lr: float = 5e-3
    alignment: float = 1.0
    scale_rates: bool = True

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        require(self.alignment >= 0, f"alignment must be at least 0, got {self.alignment}")


def rate_scale(size: int) -> float:
    """How both rates change with the batch size.

    >>> [rate_scale(size) for size in (128, 64, 16, 1)]
    [2.0, 1.0, 0.25, 0.03125]
    """
    return size / 64 * (2 if size == 1 else 1)


def symmetric_divergence(left: Tensor, right: Tensor) -> Tensor:
    """KL(left || right) + KL(right || left) of each row's softmax [B]."""
    left, right = left.float().log_softmax(-1), right.float().log_softmax(-1)
    return ((left.exp() - right.exp()) * (left - right)).sum(-1)


@register(
    "zerosiam",
    ZeroSiamConfig,
    title="ZeroSiam",
    summary="entropy through a predictor that is kept near the plain answer",
    group="entropy",
    citation=Citation(
        "Chen, Guohao and Niu, Shuaicheng and Chen, Deyu and Yang, Jiahao and Zhang, Zitian and "
        "Tan, Mingkui and Wu, Pengcheng and Shen, Zhiqi",
        "ZeroSiam: An Efficient Asymmetry for Test-Time Entropy Optimization without Collapse",
        "ICLR",
        2026,
    ),
    drawn=Drawn("#c2410c", "#fb923c", "P"),
    needs="a linear classifier",
    cost="1 forward, 1 backward",
)
class ZeroSiam(PredictorAdapter[ZeroSiamConfig]):
    """Minimises the entropy of the predictor's branch, and the distance between the branches.

    The plain branch answers and passes no gradient on, so a constant answer, which has the least
    entropy, is not a minimum: the two branches would have to agree on it first.
    """

    over_ranks = True

    def learn(self, inputs: Inputs) -> Step:
        """One step, at the rates for a batch of this size."""
        scale = rate_scale(len(inputs)) if self.config.scale_rates else 1.0
        assert self.optimizer is not None
        rates = self.config.lr, self.config.predictor_lr
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = scale * rate
        return super().learn(inputs)

    def objective(self, inputs: Inputs) -> Objective:
        """Entropy of one branch, and its divergence from the other."""
        logits, online = self.branches(inputs)
        divergence = symmetric_divergence(online, logits.detach()).mean()
        losses = {
            "entropy": entropy(online).mean(),
            "alignment": self.config.alignment * divergence,
        }
        return Objective(logits, losses)
