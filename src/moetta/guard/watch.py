"""What the guard sees: sampled images that both models have classified, and what follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moetta.guard.detectors import Frequencies, MeanDetector, RateDetector
from moetta.guard.information import Information
from moetta.guard.sureness import TEMPERATURES, Sureness
from moetta.guard.traffic import Traffic, copies, marks
from moetta.guard.trust import EQUAL, TRUSTED, Trust, confidence_in_doubt

# On shifted images a model makes more errors than its confidence admits: 1.7 times as many for
# both shipped ViTs on their classical streams. A factor of 2 is allowed.
OVERCONFIDENCE = 2.0
# Columns of a pending row; those of `Sureness` follow.
SOURCE, ADAPTED, DOUBT, MARK, SOURCE_ENTROPY, ENTROPY = range(6)
COLUMNS = ENTROPY + len(TEMPERATURES)


@dataclass(frozen=True)
class Look:
    """What one look at some sampled images showed.

    Attributes:
        agreement: share of the images on which both models agree.
        overruled: the source model's mean confidence where they disagree; 0 where they never do.
        doubt: the source model's own estimate of its error rate, 1 - mean confidence.
        concentration: diversity the adapted predictions lost against the source model's, in nats.
        entropy: mean entropy of the adapted predictions.
        source_entropy: mean entropy of the source model's predictions on the same images.
    """

    agreement: float
    overruled: float
    doubt: float
    concentration: float
    entropy: float
    source_entropy: float


class Watch:
    """Collects sampled images into looks, and looks into evidence.

    Args:
        size: images that make one look.
        tolerance: the share of the predictions that adaptation may spoil unnoticed.
        interval: looks between false alarms, over all detectors together.
    """

    def __init__(self, size: int, tolerance: float, interval: float) -> None:
        self.size, self.tolerance = size, tolerance
        # The detectors share the false alarms; the first two never rise together.
        each = 4 * interval
        self.concentration = MeanDetector(each)
        self.spread = MeanDetector(each)
        self.overruling = MeanDetector(each)
        self.entropy = MeanDetector(each)
        self.disagreement = RateDetector(each)
        # Made when the number of classes is known.
        self.frequencies: Frequencies | None = None
        self.overruled: Trust | None = None
        self.traffic: Traffic | None = None
        self.sureness = Sureness()
        self.information = Information(size)
        self.pending = torch.zeros(0, COLUMNS, dtype=torch.float64)
        self.looks = 0
        self.last: Look | None = None

    @property
    def _detectors(self) -> dict[str, MeanDetector | RateDetector]:
        return {
            "concentration": self.concentration,
            "spread": self.spread,
            "overruling": self.overruling,
            "disagreement": self.disagreement,
            "entropy": self.entropy,
        }

    @property
    def levels(self) -> dict[str, float]:
        """How far each detector is towards an alarm, which is at 1."""
        return {name: detector.level for name, detector in self._detectors.items()}

    @property
    def calm(self) -> bool:
        """Whether no detector holds any evidence: the usual sign that no change has begun."""
        return all(level == 0 for level in self.levels.values())

    @property
    def trust(self) -> float:
        """The weight of the adapted model's answers, from 0 to 1; the source model has the rest."""
        overruled = 1.0 if self.overruled is None else self.overruled.value
        if self.undoes_confusion:
            overruled = max(overruled, EQUAL)
        return max(0.0, min(overruled, 1 / self.temperature, 1 - max(self.levels.values())))

    @property
    def undoes_confusion(self) -> bool:
        """Whether the adapted predictions are more diverse than the source model's.

        A model that confuses classes predicts fewer of them. Learning that brings them back
        overrules sure answers too, and is right to. Not so where the images are of few classes.
        """
        if self.frequencies is None or self.narrow:
            return False
        # The mirror image of the loss of diversity that is trouble.
        classes = self.frequencies.counts.shape[1]
        return self.frequencies.gained > self.tolerance * math.log(classes)

    @property
    def narrow(self) -> bool:
        """Whether the images are of few classes."""
        return self.traffic is not None and self.traffic.narrow

    def informed(self, logits: Tensor) -> Tensor:
        """Logits that know how frequent each class is, in narrow traffic; else as they are."""
        return logits if self.traffic is None or not self.narrow else self.traffic.informed(logits)

    @property
    def temperature(self) -> float:
        """The temperature at which the adapted model is as sure as the source model."""
        return self.sureness.temperature

    def tells_little(self, source_logits: Tensor) -> bool:
        """Whether the source model can hardly tell these images apart, compared with others.

        Then its answers say nothing about the adapted model either, and are not to be added.
        """
        return self.information.add(source_logits)

    def see(self, source_logits: Tensor) -> None:
        """Take images that the source model has classified, to know what the traffic is like."""
        if self.traffic is None:
            self.traffic = Traffic(source_logits.shape[1], self.size)
        self.traffic.add(source_logits)

    def add(self, source_logits: Tensor, adapted_logits: Tensor) -> str | None:
        """Take images that both models have classified; names the detector that raises an alarm."""
        source_logits, adapted_logits = (z.detach().cpu() for z in (source_logits, adapted_logits))
        if self.frequencies is None or self.overruled is None:
            classes = source_logits.shape[1]
            self.frequencies, self.overruled = Frequencies(classes), Trust(classes)
        self.see(source_logits)
        doubt = 1 - source_logits.double().softmax(-1).amax(-1)
        columns = (source_logits.argmax(-1), adapted_logits.argmax(-1), doubt, marks(source_logits))
        sureness = self.sureness.measure(source_logits, adapted_logits)
        self.pending = torch.cat((self.pending, torch.cat((torch.stack(columns, 1), sureness), 1)))
        while len(self.pending) >= self.size:
            rows = self.pending[: self.size]
            self._look(rows, self.frequencies, self.overruled)
            self.pending = self.pending[self.size :].clone()
            name, level = max(self.levels.items(), key=lambda item: item[1])
            if level >= 1:
                return name
        return None

    def _look(self, rows: Tensor, frequencies: Frequencies, overruled: Trust) -> None:
        source, adapted = rows[:, : ADAPTED + 1].long().unbind(1)
        means = rows.mean(0)
        differ = source != adapted
        sure = 1 - rows[:, DOUBT]
        look = Look(
            agreement=1 - float(differ.double().mean()),
            overruled=float(sure[differ].mean()) if differ.any() else 0.0,
            doubt=float(means[DOUBT]),
            concentration=frequencies.concentration(source, adapted),
            entropy=float(means[ENTROPY]),
            source_entropy=float(means[SOURCE_ENTROPY]),
        )
        frequencies.add(source, adapted)
        # Copies of one image that both models are sure of would make all others look doubtful.
        once = ~copies(rows[:, MARK])
        overruled.add(sure[once], differ[once])
        self.sureness.add(rows[:, SOURCE_ENTROPY:])
        classes = frequencies.counts.shape[1]
        largest = math.log(classes)
        # The least that a look varies by: half a changed prediction, at half the range of ln C.
        floor = largest / (4 * self.size)
        # Spoiling a share t of the predictions takes at most about t ln C off their entropy.
        self.concentration.update(look.concentration - self.tolerance * largest, floor)
        # Where the images are of few classes, errors make them look like more.
        if self.narrow:
            self.spread.update(-look.concentration - self.tolerance * largest, floor)
        else:
            self.spread.pass_by()
        # Half-way from overruling in doubt to overruling at random, or further for good reason.
        mean = float(sure[once].mean())
        least = 1 - TRUSTED if self.undoes_confusion else EQUAL
        limit = mean - least * (mean - confidence_in_doubt(mean, classes))
        excess = (sure - limit)[differ & once].sum() / once.sum()
        self.overruling.update(float(excess), 1 / (4 * self.size))
        # Adapting makes predictions surer; half-way to knowing nothing is not adapting.
        self.entropy.update(look.entropy - (look.source_entropy + largest) / 2, floor)
        # Disagreeing on more than twice the source model's errors cannot be for the better.
        errors = min(OVERCONFIDENCE * look.doubt, 0.45)
        self.disagreement.update(float(differ.sum()), len(rows), 2 * errors)
        self.last = look
        self.looks += 1

    def clear(self) -> None:
        """Forget the evidence, after the adapted model was replaced."""
        for detector in self._detectors.values():
            detector.clear()
        if self.frequencies is not None:
            counts = self.frequencies.counts
            # The source model's frequencies still hold; the replaced model's are set to them.
            self.frequencies.counts = counts[:1].repeat(2, 1)
        if self.overruled is not None:
            self.overruled = Trust(self.overruled.classes)
        # What the traffic is like is still known.
        self.sureness = Sureness()
        self.pending = self.pending[:0].clone()
        self.looks = 0
        self.last = None

    def state(self) -> dict[str, Tensor]:
        """All that it remembers, as tensors."""
        out = {
            f"detector.{name}": torch.tensor(detector.state(), dtype=torch.float64)
            for name, detector in self._detectors.items()
        }
        out["pending"] = self.pending.clone()
        out["sureness"] = self.sureness.sums.clone()
        out["information"] = self.information.sums.clone()
        out["looks"] = torch.tensor(self.looks)
        if self.frequencies is not None and self.overruled is not None:
            out["frequencies"] = self.frequencies.counts.clone()
            out["overruled"] = self.overruled.sums.clone()
        if self.traffic is not None:
            out |= {f"traffic.{k}": v for k, v in self.traffic.state().items()}
        return out

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take back a `state`."""
        for name, detector in self._detectors.items():
            detector.restore(state[f"detector.{name}"].tolist())
        self.pending = state["pending"].detach().cpu().clone()
        self.sureness.sums = state["sureness"].detach().cpu().clone()
        self.information.sums = state["information"].detach().cpu().clone()
        self.looks = int(state["looks"])
        self.last = None
        self.frequencies = self.overruled = self.traffic = None
        if "frequencies" in state:
            counts = state["frequencies"].detach().cpu().clone()
            self.frequencies, self.overruled = Frequencies(counts.shape[1]), Trust(counts.shape[1])
            self.frequencies.counts = counts
            self.overruled.sums = state["overruled"].detach().cpu().clone()
        traffic = {k.removeprefix("traffic."): v for k, v in state.items() if "traffic." in k}
        if traffic:
            self.traffic = Traffic.of_state(traffic, self.size)
