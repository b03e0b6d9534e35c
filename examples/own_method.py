"""A method of your own, complete: learn from confident predictions as if they were labels.

Run it here with `python own_method.py`, or in a benchmark:
`moetta run --method own_method:PseudoLabel --model digits-vit --stream classical`.
"""

from dataclasses import dataclass

import torch.nn.functional as F

import moetta
from moetta.core.config import share


@dataclass(frozen=True)
class PseudoLabelConfig(moetta.SGDConfig):
    """Settings beyond the optimiser's.

    Attributes:
        confidence: predictions with at least this probability are learnt from.
    """

    confidence: float = 0.9

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        share(self, "confidence")


@moetta.register(
    "pseudo-label",
    PseudoLabelConfig,
    title="Pseudo-label",
    summary="learns from confident predictions as if they were labels",
    group="entropy",
    cost="1 forward, at most 1 backward",
)
class PseudoLabel(moetta.NormAffineAdapter[PseudoLabelConfig]):
    """Cross-entropy with the predicted class, over the confident samples."""

    def objective(self, inputs: moetta.Inputs) -> moetta.Objective:
        """The whole method: predict, choose, and say what to minimise."""
        logits = self.predict(inputs)
        confidence, label = logits.detach().softmax(-1).max(-1)
        chosen = confidence >= self.config.confidence
        loss = F.cross_entropy(logits, label, reduction="none")
        mean = (loss * chosen).sum() / chosen.sum().clamp(min=1)
        return moetta.Objective(logits, {"pseudo_label": mean}, selected=chosen)


if __name__ == "__main__":
    adapter = moetta.adapt(moetta.zoo.load("digits-vit"), "pseudo-label", lr=1e-3)
    stream = moetta.data.embedded.stream("classical", limit=640)
    right = sum(int((adapter(batch.images).argmax(1) == batch.labels).sum()) for batch in stream)
    print(f"{right / 640:.1%} right; learnt from {adapter.totals.selected} of 640 images")
