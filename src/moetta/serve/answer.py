"""From the logits of a batch to the answers of its requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moetta.serve.jobs import Delivery, Job, deliver
from moetta.serve.metrics import Metrics
from moetta.serve.tenant import Tenant


class NotFinite(Exception):
    """The model's logits are not finite."""


class Answer:
    """Called with the logits of a batch as soon as they are final: answers every request in it.

    Logits beyond those of the requests belong to images that kept them company.

    Args:
        jobs: the batch.
        labels: names of the classes.
        metrics: where answered images are counted.
        give_way: called when the answers are on their way.

    Attributes:
        tenant: whose adapter answers.
        routed: whether the adapter was asked, and so its experts.
        given: when the answers were given, in monotonic seconds; 0 before.
        classes: each image's class [B].
        entropy: each prediction's entropy [B].
        routing: the experts of each image, by layer.
    """

    def __init__(
        self,
        jobs: list[Job],
        labels: tuple[str, ...],
        metrics: Metrics,
        give_way: Callable[[], None],
    ) -> None:
        self._jobs = jobs
        self._labels = labels
        self._metrics = metrics
        self._give_way = give_way
        self.tenant: Tenant | None = None
        self.routed = True
        self.given = 0.0
        self.classes = torch.zeros(0, dtype=torch.long)
        self.entropy = torch.zeros(0)
        self.routing: dict[str, Tensor] = {}

    def early(self, logits: Tensor) -> None:
        """Answer before the update; what is not finite is left to the guard."""
        if bool(torch.isfinite(logits).all()):
            self(logits)

    def __call__(self, logits: Tensor) -> None:
        """Answer.

        Raises:
            NotFinite: there is nothing to answer with.
        """
        assert self.tenant is not None
        logits = logits.float()
        if not bool(torch.isfinite(logits).all()):
            raise NotFinite
        size = len(self._jobs)
        # A guard that answers with the source model asks no experts.
        if self.routed and self.tenant.mode != "source":
            routing = self.tenant.answering.routing(len(logits))
            self.routing = {name: experts[:size] for name, experts in routing.items()}
        logits = logits[:size]
        log_p = logits.log_softmax(1)
        p = log_p.exp()
        self.entropy = -(p * log_p).sum(1)
        most = min(max(job.ticket.top_k for job in self._jobs), logits.shape[1])
        top = p.topk(most)
        self.classes = top.indices[:, 0]
        step = self.tenant.answering.steps
        rows = zip(self._jobs, top.values.tolist(), top.indices.tolist(), strict=True)
        deliveries: list[Delivery] = []
        for number, (job, values, indices) in enumerate(rows):
            result: dict[str, Any] = {
                "labels": [
                    {"label": self._labels[index], "class": index, "probability": value}
                    for index, value in zip(
                        indices[: job.ticket.top_k], values[: job.ticket.top_k], strict=True
                    )
                ]
            }
            if job.ticket.explain:
                result["entropy"] = float(self.entropy[number])
                result["entropy_share"] = float(self.entropy[number]) / math.log(logits.shape[1])
                result["experts"] = {
                    name: experts[number].tolist() for name, experts in self.routing.items()
                }
            deliveries.append((job, result, step))
        deliver(deliveries)
        self.given = time.monotonic()
        self._give_way()
        self._metrics.images.labels("answered").inc(len(deliveries))
