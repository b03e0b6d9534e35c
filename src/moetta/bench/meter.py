"""What is measured along a stream: rows per batch, counts per domain, and expert choices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moetta.core.step_report import StepReport

BINS = 15
QUARTERS = 4


@dataclass(frozen=True)
class Scored:
    """One batch and its predictions.

    Attributes:
        step: number of the batch in the stream.
        domains: each sample's domain [B].
        labels: each sample's class [B].
        logits: what the method predicted [B, C].
        report: what the method did.
        seconds: how long that took.
        baseline: the source model's logits, if they were computed.
        baseline_seconds: how long that took.
    """

    step: int
    domains: Tensor
    labels: Tensor
    logits: Tensor
    report: StepReport
    seconds: float
    baseline: Tensor | None = None
    baseline_seconds: float = math.nan


class Meter:
    """Sums over a stream. Their size does not depend on its length, except for one row per batch.

    The state consists of tensors only, so that a checkpoint restores it bit for bit.

    Attributes:
        columns: one list per column with one entry per batch; NaN where there is no value.
        counts: samples and correct predictions [domains, quarters, 2].
        paired: on the batches that the source model saw too: samples, correct predictions, the
            source model's correct predictions [domains, quarters, 3].
        bins: samples, summed confidence and correct predictions by confidence [BINS, 3].
        top5: samples whose class is among the five likeliest.
        routing: samples by quarter, layer, domain and expert, if the method has experts.
        similarity: by measurement and layer: step, weight cosine, bias cosine.
    """

    def __init__(self, domains: Sequence[str], batches: int, experts: int = 0) -> None:
        self.domains, self.batches, self.experts = tuple(domains), batches, experts
        self.columns: dict[str, list[float]] = {}
        self.counts = torch.zeros(len(domains), QUARTERS, 2, dtype=torch.int64)
        self.paired = torch.zeros(len(domains), QUARTERS, 3, dtype=torch.int64)
        self.bins = torch.zeros(BINS, 3, dtype=torch.float64)
        self.top5 = torch.zeros((), dtype=torch.int64)
        self.routing = torch.zeros(QUARTERS, 0, len(domains), 0, dtype=torch.int64)
        self.similarity = torch.zeros(0, 0, 3, dtype=torch.float64)

    @property
    def rows(self) -> int:
        """Batches seen."""
        return len(self.columns.get("step", ()))

    def total(self, column: str) -> float:
        """Sum of a column, without missing values."""
        return math.fsum(v for v in self.columns.get(column, ()) if not math.isnan(v))

    def quarter(self, step: int) -> int:
        """Which quarter of the stream a batch belongs to."""
        return min(step * QUARTERS // self.batches, QUARTERS - 1)

    def add(self, scored: Scored) -> None:
        """Count one batch."""
        quarter, domains, labels = self.quarter(scored.step), scored.domains, scored.labels
        probabilities = scored.logits.float().softmax(-1)
        confidence, predicted = probabilities.max(-1)
        right = predicted == labels
        self._count(self.counts, domains, quarter, right)
        ranked = probabilities.topk(min(5, probabilities.shape[1])).indices
        self.top5 += (ranked == labels[:, None]).any(1).sum()
        place = (confidence * BINS).long().clamp(max=BINS - 1)
        values = torch.stack((torch.ones_like(confidence), confidence, right.float()), 1).double()
        self.bins.index_add_(0, place, values)
        base = math.nan
        if scored.baseline is not None:
            also = scored.baseline.argmax(-1) == labels
            base = float(also.sum())
            self._count(self.paired, domains, quarter, right, also)
        self._route(scored.report.routing, domains, quarter)
        self._row(scored, float(right.sum()), base)

    def _count(self, into: Tensor, domains: Tensor, quarter: int, *rights: Tensor) -> None:
        ones = torch.ones_like(domains)
        values = torch.stack((ones, *(right.long() for right in rights)), 1)
        into[:, quarter].index_add_(0, domains, values)

    def _route(self, routing: dict[str, Tensor], domains: Tensor, quarter: int) -> None:
        for layer, experts in enumerate(routing.values()):
            experts = experts.cpu()
            most = max(int(experts.max()) + 1, self.experts)
            self._grow(len(routing), most)
            k = experts.shape[1]
            place = domains.repeat_interleave(k) * self.routing.shape[3] + experts.flatten()
            flat = self.routing[quarter, layer].view(-1)
            flat += torch.bincount(place, minlength=len(flat))

    def _grow(self, layers: int, experts: int) -> None:
        quarters, had, domains, seen = self.routing.shape
        if layers > had or experts > seen:
            larger = torch.zeros(
                quarters, max(layers, had), domains, max(experts, seen), dtype=torch.int64
            )
            larger[:, :had, :, :seen] = self.routing
            self.routing = larger

    def _row(self, scored: Scored, correct: float, base: float) -> None:
        report = scored.report
        chosen = report.backwards if report.selected is None else int(report.selected.sum())
        row = {
            "step": scored.step,
            "samples": report.samples,
            "correct": correct,
            "correct_noadapt": base,
            "entropy": float(report.entropy.mean()),
            "selected_share": chosen / report.samples,
            "seconds": scored.seconds,
            "seconds_noadapt": scored.baseline_seconds,
            **{f"loss_{name}": value for name, value in report.losses.items()},
        }
        before = self.rows
        for name in (*row, *self.columns):
            column = self.columns.setdefault(name, [math.nan] * before)
            if len(column) == before:
                column.append(float(row.get(name, math.nan)))

    def measure_similarity(self, step: int, experts: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Note how similar the experts of each layer are: weights and biases [E, D] by layer."""
        now = [[step, mean_cosine(w), mean_cosine(b)] for w, b in experts.values()]
        if now:
            new = torch.tensor(now, dtype=torch.float64)[None]
            self.similarity = torch.cat((self.similarity, new)) if len(self.similarity) else new

    def calibration_error(self) -> float:
        """Expected calibration error: mean gap between confidence and accuracy over 15 bins."""
        count = self.bins[:, 0].sum().clamp(min=1)
        return float((self.bins[:, 1] - self.bins[:, 2]).abs().sum() / count)

    def tensors(self) -> dict[str, Tensor]:
        """The whole state."""
        columns = {
            f"column.{i:03d}.{name}": torch.tensor(values, dtype=torch.float64)
            for i, (name, values) in enumerate(self.columns.items())
        }
        return {name: getattr(self, name).clone() for name in _STATE} | columns

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        for name in _STATE:
            setattr(self, name, tensors[name].clone())
        self.columns = {
            key.split(".", 2)[2]: tensors[key].tolist()
            for key in sorted(tensors)
            if key.startswith("column.")
        }


_STATE = ("counts", "paired", "bins", "top5", "routing", "similarity")


def mean_cosine(rows: Tensor) -> float:
    """Mean cosine between pairs of rows; NaN where fewer than two rows are non-zero.

    >>> mean_cosine(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 0.0]]))
    0.3333333333333333
    """
    cosines = pairwise_cosine(rows)
    n = len(cosines)
    return float((cosines.sum() - n) / (n * (n - 1))) if n > 1 else math.nan


def pairwise_cosine(rows: Tensor) -> Tensor:
    """Cosines between the non-zero rows [n, n], in float64."""
    rows = rows.detach().double().cpu()
    norms = rows.norm(dim=1)
    unit = rows[norms > 0] / norms[norms > 0, None]
    return torch.matmul(unit, unit.T)
