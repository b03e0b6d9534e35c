"""ZeroSiam: a predictor before the classifier makes constant answers unattractive (Chen et al.)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moetta.core.adapter import Source
from moetta.core.config import positive, require
from moetta.core.functional import entropy
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import NormAffineAdapter, SGDConfig
from moetta.core.objective import Objective
from moetta.methods.registry import Citation, Drawn, register
from moetta.nn.head import Head, find_head, listening


@dataclass(frozen=True)
class ZeroSiamConfig(SGDConfig):
    """ZeroSiam. The rates are the authors' for a ViT-B and batches of 64; presets have others'.

    Attributes:
        seed: not used.
        lr: learning rate of the norm layers.
        predictor_lr: learning rate of the predictor.
        alignment: weight of the divergence between the two branches (alpha).
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

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "predictor_lr")
        require(self.alignment >= 0, f"alignment must be at least 0, got {self.alignment}")


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
class ZeroSiam(NormAffineAdapter[ZeroSiamConfig]):
    """Minimises the entropy of the predictor's branch, and the distance between the branches.

    The plain branch answers and passes no gradient on, so a constant answer, which has the least
    entropy, is not a minimum: the two branches would have to agree on it first.
    """

    head: Head
    predictor: nn.Parameter

    def build(self, source: Source) -> None:
        """Train the norm layers and the predictor, which starts as the identity."""
        super().build(source)
        self.head = find_head(self.network)
        norms = list(self.trained.values())
        weight = self.head.module.weight
        self.predictor = nn.Parameter(torch.eye(weight.shape[1], device=weight.device))
        self.make_trainable([("predictor", self.predictor)])
        groups = [
            {"params": norms},
            {"params": [self.predictor], "lr": self.config.predictor_lr},
        ]
        self.optimizer = torch.optim.SGD(groups, lr=self.config.lr, momentum=self.config.momentum)

    def online(self, features: Tensor) -> Tensor:
        """The logits of the predictor's branch."""
        head = self.head.module
        bias = None if head.bias is None else head.bias.float()
        return F.linear(F.linear(features.float(), self.predictor), head.weight.float(), bias)

    def objective(self, inputs: Inputs) -> Objective:
        """Entropy of one branch, and its divergence from the other."""
        with listening(self.network, self.head) as heard:
            logits = self.predict(inputs)
        online = self.online(heard.of(logits, self.head))
        divergence = symmetric_divergence(online, logits.detach()).mean()
        losses = {
            "entropy": entropy(online).mean(),
            "alignment": self.config.alignment * divergence,
        }
        return Objective(logits, losses)
