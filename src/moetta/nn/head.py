"""The classifier at the end of a network: finding it, listening to it, wrapping it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moetta.nn.norms import listed
from moetta.nn.ranks import Share


@dataclass(frozen=True)
class Head:
    """The linear layer that turns a sample's features into logits.

    Attributes:
        name: its dotted name in the network.
        module: the layer.
    """

    name: str
    module: nn.Linear


def find_head(network: nn.Module) -> Head:
    """The last linear layer of a network.

    Raises:
        ValueError: there is none; the message lists what there is.
    """
    linear = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear)]
    if not linear:
        raise ValueError(
            "the model has no linear classifier at its end, which this method needs; found "
            f"{listed(network)}"
        )
    return Head(*linear[-1])


NOT_THE_CLASSIFIER = (
    "the model's logits are not the output of its last linear layer {name!r}; this method needs a "
    "model whose logits come from one linear layer over one feature vector per sample"
)


@dataclass
class Heard:
    """A head's inputs and outputs, one per pass."""

    passes: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def of(self, logits: Tensor, head: Head, share: Share | None = None) -> Tensor:
        """The features [B, D] behind these logits; on several ranks, those of this rank's rows.

        Raises:
            ValueError: the head did not produce these logits, so its features do not explain them.
        """
        with contextlib.nullcontext() if share is None else share.ranks.together():
            if len(self.passes) == 1:
                features, output = self.passes[0]
                if share is not None:
                    output, logits = share.real(output), share.mine(logits)
                if features.dim() == 2 and _alike(output.detach(), logits.detach()):
                    return features
            raise ValueError(NOT_THE_CLASSIFIER.format(name=head.name))


def _alike(left: Tensor, right: Tensor) -> bool:
    """Whether both are equal, ignoring NaN."""
    if left.shape != right.shape:
        return False
    left, right = left.float(), right.float()
    return bool(((left == right) | left.isnan()).all())


@contextlib.contextmanager
def listening(network: nn.Module, head: Head) -> Iterator[Heard]:
    """Within the block, a forward pass leaves the features that the head was given."""
    heard = Heard()

    def hook(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        heard.passes.append((arguments[0], output))

    # By name: the head may have been wrapped since it was found.
    handle = network.get_submodule(head.name).register_forward_hook(hook)
    try:
        yield heard
    finally:
        handle.remove()


class WrappedHead(nn.Module):
    """A classifier whose features or logits are corrected.

    Subclasses write `forward`. It may leave what the correction learnt from a batch in ``fresh``:
    the adapter takes it over if the batch counts, so a refused batch changes nothing.

    Attributes:
        classifier: the original layer.
        learning: whether the current pass learns from its batch.
        fresh: the running values after this batch, by name.
        skipped: why this batch says nothing to learn or correct by; None if it does.
    """

    def __init__(self, classifier: nn.Linear) -> None:
        super().__init__()
        self.classifier = classifier
        self.learning = False
        self.fresh: dict[str, Tensor] = {}
        self.skipped: str | None = None

    def check(self, features: Tensor) -> Tensor:
        """Refuse features that are not one vector per sample; returns them in float32."""
        if features.dim() != 2:
            raise ValueError(
                f"the classifier gets features of shape {tuple(features.shape)}; this method needs "
                "one vector per sample, [B, D]"
            )
        return features if features.dtype == torch.float64 else features.float()

    def classify(self, features: Tensor) -> Tensor:
        """The original layer's output."""
        logits: Tensor = self.classifier(features)
        return logits
