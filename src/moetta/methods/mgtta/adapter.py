"""MGTTA: norm layers stepped by a learned rule, towards source features (Deng et al., 2025)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moetta.core import source_images
from moetta.core.adapter import Source
from moetta.core.config import Config, positive, require, share
from moetta.core.functional import entropy
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import NormAffineAdapter
from moetta.core.objective import Objective, Step
from moetta.methods.registry import Citation, Drawn, register
from moetta.nn.features import Features
from moetta.nn.mgg import MGG, WIDTH, load_mgg

SHIPPED = Path(str(files("moetta.methods").joinpath("weights", "mgg.safetensors")))


@dataclass(frozen=True)
class MGTTAConfig(Config):
    """MGTTA.

    Attributes:
        seed: not used.
        lr: length of a step; the generator gives it direction.
        moments: weight of the distance between the feature moments of the batch and of the source
            images. The authors advise 0.2 for ImageNet-R.
        moment_divisor: what that weight is divided by: 64 in the paper, at any batch size.
        beta1: decay of the average gradient that the generator sees.
        beta2: decay of the average squared gradient.
        mgg: file with the generator (safetensors, or the authors' .pth); None is the one shipped
            with the package.
        source_batch: batch size for computing the feature moments of the source images.
    """

    lr: float = 3e-4
    moments: float = 0.4
    moment_divisor: float = 64.0
    beta1: float = 0.9
    beta2: float = 0.99
    mgg: str | None = None
    source_batch: int = 64

    @property
    def needs_source(self) -> bool:
        """The feature moments are computed from source images."""
        return True

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if isinstance(self.mgg, os.PathLike):
            object.__setattr__(self, "mgg", os.fspath(self.mgg))  # a Path works too
        super().__post_init__()
        positive(self, "lr", "moment_divisor", "source_batch")
        share(self, "beta1", "beta2")
        require(max(self.beta1, self.beta2) < 1, "beta1 and beta2 must be below 1")
        require(self.moments >= 0, f"moments must be at least 0, got {self.moments}")


@register(
    "mgtta",
    MGTTAConfig,
    title="MGTTA",
    summary="steps by a learned update rule towards the source images' features",
    group="entropy",
    citation=Citation(
        "Deng, Qi and Niu, Shuaicheng and Zhang, Ronghao and Chen, Yaofo and Zeng, Runhao and "
        "Chen, Jian and Hu, Xiping",
        "Learning to Generate Gradients for Test-Time Adaptation via Test-Time Training Layers",
        "AAAI",
        2025,
    ),
    drawn=Drawn("#c2560c", "#ff9c54", "X"),
    cost="1 forward, 1 backward",
    paper_row=6,
)
class MGTTA(NormAffineAdapter[MGTTAConfig]):
    """Every scale and shift takes the step that the generator makes of its gradient.

    A batch of one has no spread to compare with the source images'; only its entropy is minimised.
    The features are recorded on the plain network: a compiled model is used by `paused` only.
    """

    held_in_state = ("mgg",)
    over_ranks = True

    def make_optimizer(self, parameters: list[nn.Parameter]) -> None:
        """No optimiser: the generator replaces it."""

    def build(self, source: Source) -> None:
        """Train the norm layers; load the generator; measure or load the source features."""
        self.features = Features(self.network)
        super().build(source)
        source_images.obtain(self, source, self._source_moments)
        self.use(self.first_mgg())

    def first_mgg(self) -> MGG:
        """The generator to start with."""
        return load_mgg(self.config.mgg or SHIPPED)

    def use(self, mgg: MGG) -> None:
        """Start afresh with this generator."""
        self._mgg = mgg.to(self.device)
        # The generator is part of the state: a loaded adapter goes on with the one that was saved,
        # not with the one it started with.
        self.running.update({f"mgg.{k}": v.detach() for k, v in self._mgg.state_dict().items()})
        count = sum(p.numel() for p in self.trained.values())
        weight, bias = (t.detach().clone() for t in self._mgg.start(count))
        zeros = torch.zeros(count, device=self.device)
        self.running.update(fast_weight=weight, fast_bias=bias, m=zeros, v=zeros.clone())
        self.running["n"] = torch.zeros((), dtype=torch.int64, device=self.device)

    @property
    def activated_parameters(self) -> int:
        """The trained numbers, each with its fast weights."""
        return super().activated_parameters * (1 + WIDTH * WIDTH + WIDTH)

    def _source_moments(self, source: Any) -> dict[str, Tensor]:
        """Mean and standard deviation of every feature over the source images."""
        count, total, squares = 0, torch.zeros(()), torch.zeros(())
        for batch in source_images.batches(source, self.config.source_batch):
            with torch.no_grad(), self.features.listening() as heard:
                batch.map(lambda t: t.to(self.device)).logits(self.network)
                rows = self.features.join(heard).cpu().double()
            count += len(rows)
            total, squares = total + rows.sum(0), squares + (rows**2).sum(0)
        if count < 2:
            raise ValueError("mgtta needs at least two source images to measure their spread")
        mean = total / count
        var = (squares - count * mean**2).clamp(min=0) / (count - 1)
        return {"source_mean": mean.float(), "source_std": var.sqrt().float()}

    def objective(self, inputs: Inputs) -> Objective:
        """The mean entropy, and how far the features' moments are from the source images'."""
        with self.features.listening() as heard:
            logits = inputs.logits(self.network)
        phi = inputs.whole(self.features.join(heard))
        mean, std = self.running["source_mean"], self.running["source_std"]
        assert mean is not None
        assert std is not None
        if phi.shape[1:] != mean.shape:
            raise ValueError(
                f"this input gives {phi.shape[1]} features, the source images gave {len(mean)}; "
                "use inputs of the same kind"
            )
        entropies = entropy(logits)
        losses = {"entropy": entropies.mean()}
        if len(phi) > 1:
            distance = ((phi.std(0) - std) ** 2).sum() + ((phi.mean(0) - mean) ** 2).sum()
            losses["moments"] = self.config.moments / self.config.moment_divisor * distance
        return Objective(logits, losses, entropy=entropies)

    def learn(self, inputs: Inputs) -> Step:
        """One step of every trained number, by the generator."""
        found = self.objective(inputs)
        self.predicted(found.logits)
        step = Step(found.logits, forwards=len(inputs), entropy=found.entropy, losses=found.losses)
        grads = self.gradients(found.total())
        if grads is None:
            step.skipped = "non-finite loss or gradient"
            return step
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            running: dict[str, Any] = self.running
            x, after = self.scaled(flat(grads))
            weights = {k: running[f"mgg.{k}"] for k in self._mgg.state_dict()}
            fast = (running["fast_weight"], running["fast_bias"])
            u, weight, bias = torch.func.functional_call(self._mgg, weights, (x, *fast))
            after.update(fast_weight=weight, fast_bias=bias)
            if not all(torch.isfinite(t).all() for t in (u, *after.values())):
                step.skipped = "non-finite update"
                return step
            running.update(after)
            self.set_values(flat(list(self.trained.values())) - self.config.lr * u)
        step.backwards = len(inputs)
        return step

    def scaled(self, grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The generator's input [N, 2], and the averages after this gradient."""
        m, v, n = self.running["m"], self.running["v"], self.running["n"]
        assert m is not None
        assert v is not None
        assert n is not None
        b1, b2 = self.config.beta1, self.config.beta2
        m, v, n = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2, n + 1
        # The corrections run one step ahead (n + 1). The authors' generator was trained with that.
        count = int(n) + 1
        root = (v / (1 - b2**count)).sqrt() + 1e-8
        x = torch.stack([m / (1 - b1**count) / root, grad / root], dim=1)
        return x, {"m": m, "v": v, "n": n}

    @torch.no_grad()
    def set_values(self, values: Tensor) -> None:
        """Write all trained numbers."""
        sizes = [p.numel() for p in self.trained.values()]
        for parameter, piece in zip(self.trained.values(), torch.split(values, sizes), strict=True):
            parameter.copy_(piece.view_as(parameter))


def flat(tensors: list[Any]) -> Tensor:
    """All numbers of several tensors in one float32 vector."""
    return torch.cat([t.detach().reshape(-1).float() for t in tensors])
