"""REM: the more of an image is hidden, the less sure the prediction may be (Han et al., 2025)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moetta.core.adapter import Source
from moetta.core.config import Config, positive, require
from moetta.core.functional import entropy
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import NormAffineAdapter
from moetta.core.objective import Objective
from moetta.methods.registry import Citation, Drawn, register
from moetta.methods.sar import early
from moetta.nn.attention import class_attention, find_attention
from moetta.nn.blocks import Block, find_blocks
from moetta.nn.norms import Norm


@dataclass(frozen=True)
class REMConfig(Config):
    """REM, for Vision Transformers with a class token.

    Attributes:
        seed: not used.
        lr: learning rate of Adam.
        hidden: shares of the patches that are hidden, one per further view, rising. Those that
            the class token attends to most are hidden first.
        ranking: weight of the loss that keeps the views' entropies in order.
        margin: how much the entropy must rise from view to view.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {"released": {"hidden": (0.1, 0.2)}}

    lr: float = 1e-3
    hidden: tuple[float, ...] = (0.05, 0.1)
    ranking: float = 1.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        positive(self, "lr")
        shares = (0.0, *self.hidden)
        rising = all(a < b < 1 for a, b in zip(shares, self.hidden, strict=False))
        require(
            bool(self.hidden) and rising,
            f"hidden must be shares between 0 and 1, rising, got {self.hidden}",
        )


def consistency(logits: list[Tensor]) -> Tensor:
    """Cross-entropy of each view against every view that shows more.

    >>> views = [torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0]])]
    >>> round(consistency(views).item(), 6)
    1.818759
    """
    logs = [z.float().log_softmax(-1) for z in logits]
    terms = [-(a.detach().exp() * b).sum(-1).mean() for a, b in combinations(logs, 2)]
    return torch.stack(terms).sum()


def ranking(logits: list[Tensor], margin: float = 0.0) -> Tensor:
    """How much less sure each view is than the views that show less.

    >>> views = [torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]])]
    >>> round(ranking(views).item(), 6)
    0.655627
    """
    known = [entropy(z) for z in logits]
    terms = [(a - b.detach() + margin).relu().mean() for a, b in combinations(known, 2)]
    return torch.stack(terms).sum()


@register(
    "rem",
    REMConfig,
    title="REM",
    summary="ranks the entropies of views with more and more hidden",
    group="consistency",
    citation=Citation(
        "Han, Jisu and Na, Jaemin and Hwang, Wonjun",
        "Ranked Entropy Minimization for Continual Test-Time Adaptation",
        "ICML",
        2025,
    ),
    drawn=Drawn("#9d174d", "#f472b6", "*"),
    needs="a ViT with a class token",
    cost="3 forwards, 3 backwards",
)
class REM(NormAffineAdapter[REMConfig]):
    """The whole image teaches the views with patches hidden, and stays the surest."""

    first: Block
    attention: str

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(parameters, lr=self.config.lr)

    def choose(self, norms: list[Norm]) -> list[Norm]:
        """All but the last stages, as SAR does."""
        return early(self.network, norms)

    def build(self, source: Source) -> None:
        """Train the early norm layers."""
        try:
            blocks = find_blocks(self.network)
            self.first, self.attention = blocks[0], find_attention(self.network, blocks[-1])
        except ValueError as error:
            raise ValueError(
                "rem needs a ViT with a class token and attention blocks (timm's, torchvision's or "
                f"Hugging Face's), not {type(self.network).__name__}: {error}"
            ) from error
        if getattr(self.network, "grad_checkpointing", False):
            raise ValueError(
                "rem hides patches during the forward pass, but gradient checkpointing would "
                "repeat that pass with all of them; turn checkpointing off"
            )
        super().build(source)

    def objective(self, inputs: Inputs) -> Objective:
        """Agreement of the views, and the order of their entropies."""
        size = len(inputs)
        with class_attention(self.network, self.attention) as attended:
            logits = self.predict(inputs)
        self.predicted(logits)
        views = [logits]
        order = attended[0].argsort(1)  # the least attended first
        patches = order.shape[1]
        for share in self.config.hidden:
            keep = order[:, : max(1, int(patches * (1 - share)))].sort(1).values
            with self._showing(keep, patches):
                views.append(inputs.logits(self.model))
        losses = {
            "consistency": consistency(views),
            "ranking": self.config.ranking * ranking(views, self.config.margin),
        }
        passes = size * len(views)
        return Objective(logits, losses, forwards=passes, backwards=passes)

    @contextlib.contextmanager
    def _showing(self, keep: Tensor, patches: int) -> Iterator[None]:
        """Within the block, the first transformer block gets only these patches of each image."""

        def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            tokens, *rest = arguments
            prefix = tokens.shape[1] - patches
            index = keep[:, :, None].expand(-1, -1, tokens.shape[2]) + prefix
            shown = torch.cat((tokens[:, :prefix], tokens.gather(1, index)), 1)
            return (shown, *rest)

        module = self.network.get_submodule(self.first.name)
        handle = module.register_forward_pre_hook(hook)
        try:
            yield
        finally:
            handle.remove()
