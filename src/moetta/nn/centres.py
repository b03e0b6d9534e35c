"""A classifier on centred features: the mean of an image's style is subtracted first."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moetta.nn import ranks
from moetta.nn.styles import Styles


class CentredHead(nn.Module):
    """The classifier, on features less the centre of their style.

    The centre of a style is the mean of its features, mixed with the overall mean as if that were
    ``shrink`` more images, less what the classes seen so far put into it. Where one class is seen
    more often than others, the mean leans towards that class, and subtracting the mean would
    subtract the class. So the lean is taken out: a Σ (q_c - 1/C) v_c, where q_c is how often class
    c was predicted, v_c the classifier's vector of class c less the mean of all, and ``a`` how long
    a feature is along the vector of its own class, on average. Traffic of balanced classes has no
    lean.

    Args:
        inner: the linear layer.
        styles: says which style each sample has.
        shrink: how many images the overall mean counts for.
        balanced: take out the lean.
        running: where the running values are kept.

    Attributes:
        learning: count the batch in the means before they are subtracted.
        pending: the running values with that batch, for the adapter to keep.
    """

    def __init__(
        self,
        inner: nn.Linear,
        styles: Styles,
        running: dict[str, Any],
        *,
        shrink: float,
        balanced: bool,
    ) -> None:
        super().__init__()
        self.inner, self.running, self.shrink, self.balanced = inner, running, shrink, balanced
        self._styles = [styles]  # a list hides it from torch's module tree: it is not a part
        options: dict[str, Any] = {"device": inner.weight.device, "dtype": torch.float32}
        running |= {
            "feature_count": torch.zeros(styles.count, **options),
            "feature_sum": torch.zeros(styles.count, inner.in_features, **options),
            "class_count": torch.zeros(inner.out_features, **options),
            # Numerator and denominator of the length along the own class.
            "class_length": torch.zeros(2, **options),
        }
        self.learning = False
        self.pending: dict[str, Tensor] = {}

    def forward(self, phi: Tensor) -> Tensor:
        """[B, D] to centred logits."""
        routing = self._styles[0].last
        if phi.dim() != 2 or routing is None or len(routing.experts) != len(phi):
            raise ValueError(
                "moetta_plus needs a classifier whose last linear layer sees one vector per "
                f"sample, after its early norm layers; here it sees {tuple(phi.shape)}"
            )
        logits = self.inner(phi)
        # The means need float32's digits.
        with torch.autocast(phi.device.type, enabled=False):
            if self.learning:
                self.pending = self.advanced(ranks.whole(phi.detach().float()))
            shift = self.shift(self.running | self.pending if self.learning else self.running)
            centred: Tensor = logits.float() - shift[routing.experts[:, 0]]
            return centred

    @torch.no_grad()
    def shift(self, values: dict[str, Tensor]) -> Tensor:
        """What the centre of each style adds to the logits [K, C]."""
        count, total = values["feature_count"], values["feature_sum"]
        overall = total.sum(0) / count.sum().clamp(min=1)
        centres = (total + self.shrink * overall) / (count + self.shrink)[:, None]
        weight = self.inner.weight.detach().float()
        if self.balanced:
            classes, (top, bottom) = values["class_count"], values["class_length"]
            extra = classes / classes.sum().clamp(min=1) - (classes.sum() > 0) / len(classes)
            lean = extra @ (weight - weight.mean(0))
            centres = centres - top / bottom.clamp(min=1e-12) * lean
        return F.linear(centres, weight)

    @torch.no_grad()
    def advanced(self, phi: Tensor) -> dict[str, Tensor]:
        """The running values with these features, of the whole batch."""
        r, one = self.running, self._styles[0].whole
        new = {
            "feature_count": r["feature_count"] + one.sum(0),
            "feature_sum": r["feature_sum"] + one.T @ phi,
        }
        if self.balanced:
            weight = self.inner.weight.detach().float()
            bias = None if self.inner.bias is None else self.inner.bias.detach().float()
            # Centred by what is known before this batch: the classes decide about the centres.
            predicted = (F.linear(phi, weight, bias) - one @ self.shift(r)).argmax(1)
            own = (weight - weight.mean(0))[predicted]
            length = torch.stack(((own * phi).sum(), own.square().sum()))
            seen = torch.bincount(predicted, minlength=len(weight))
            new["class_count"] = r["class_count"] + seen
            new["class_length"] = r["class_length"] + length
        return new
