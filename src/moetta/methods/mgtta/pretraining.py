"""Training a meta-gradient generator: adapt to a few shifted images, over and over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from moetta.core.adapter import Source
from moetta.core.inputs import Inputs
from moetta.methods.mgtta.adapter import MGTTA, MGTTAConfig, flat
from moetta.nn.mgg import MGG

Domains = Sequence[tuple[Tensor, Tensor]]


class _Learner(MGTTA):
    """MGTTA before there is a generator."""

    def first_mgg(self) -> MGG:
        return MGG(self.config.seed)


def pretrain(
    model: nn.Module,
    images: Tensor,
    *,
    source: Source,
    validation: Domains | None = None,
    epochs: int = 40,
    lr: float = 1e-2,
    step_lr: float = 1e-4,
    batch: int = 2,
    samples: int = 128,
    seed: int = 2020,
    moments: float = 0.4,
    validation_lr: float = 1e-3,
    validation_batch: int = 64,
    on_epoch: Callable[[int, float, float | None], None] | None = None,
) -> MGG:
    """Train a generator on unlabelled, shifted images, by the recipe of the paper's authors.

    The norm layers take the generator's step; the gradient of the next batch's loss, through that
    one step, shows how the generator should have answered. Averages and fast weights start afresh
    in each epoch, whose first batch therefore teaches nothing; the norm layers continue from where
    they are.

    Args:
        model: the source model; it is not changed.
        images: shifted images; ``samples`` of them are drawn once, in the order of use.
        source: clean images, or their saved moments, as for `moetta.adapt`.
        validation: (images, labels) of each domain; after every epoch the generator adapts the
            source model to each, and the one with the best mean accuracy is returned. Without it,
            the last one is.
        epochs: passes over the images.
        lr: learning rate of the generator (Adam).
        step_lr: length of the norm layers' steps.
        batch: images per step.
        samples: images to use; all if there are fewer.
        seed: seed of the generator's start and of the draw.
        moments: weight of the feature moments in the loss, as in `MGTTAConfig`.
        validation_lr: length of the norm layers' steps in validation.
        validation_batch: batch size in validation.
        on_epoch: called with the epoch's number (from 0), mean loss and validation accuracy.

    Raises:
        ValueError: no images, or a number that is not above zero.
    """
    if not isinstance(images, Tensor) or images.dim() < 2 or len(images) == 0:
        raise ValueError("pretrain needs a non-empty tensor of images [N, C, H, W]")
    numbers = {"epochs": epochs, "lr": lr, "batch": batch, "samples": samples}
    for name, value in numbers.items():
        if value <= 0:
            raise ValueError(f"{name} must be above 0, got {value}")
    learner = _Learner(model, MGTTAConfig(seed=seed, lr=step_lr, moments=moments), source)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    batches = torch.split(images[order[:samples]].to(learner.device), batch)
    mgg = MGG(seed).to(learner.device)
    optimizer = torch.optim.Adam(mgg.parameters(), lr=lr)
    best, best_accuracy = copy.deepcopy(mgg), -1.0
    for epoch in range(epochs):
        with torch.inference_mode(False), torch.enable_grad():
            loss = _epoch(learner, mgg, optimizer, batches)
        accuracy = None
        if validation is not None:
            accuracy = _accuracy(learner, mgg, validation, validation_lr, validation_batch)
        if accuracy is None or accuracy > best_accuracy:
            best, best_accuracy = copy.deepcopy(mgg), accuracy or 0.0
        if on_epoch is not None:
            on_epoch(epoch, loss, accuracy)
    return best.cpu().requires_grad_(False)


def _epoch(
    learner: MGTTA, mgg: MGG, optimizer: torch.optim.Optimizer, batches: Sequence[Tensor]
) -> float:
    """One pass over the images; returns the mean loss."""
    learner.use(copy.deepcopy(mgg))  # clears the averages
    parameters = list(mgg.parameters())
    values = flat(list(learner.trained.values()))
    weight, bias = mgg.start(len(values))
    stepped: Tensor | None = None
    total = 0.0
    for images in batches:
        loss = learner.objective(Inputs((images,), {})).total()
        grads = learner.gradients(loss)
        if grads is None:
            raise ValueError(
                "the loss or its gradient is no longer finite; lower step_lr or check the images"
            )
        total += float(loss.detach())
        gradient = flat(grads)
        if stepped is not None:
            # A parameter that was not used gets no gradient, so that Adam leaves it alone.
            found = torch.autograd.grad(stepped, parameters, gradient, allow_unused=True)
            for parameter, grad in zip(parameters, found, strict=True):
                parameter.grad = grad
            optimizer.step()
        x, averages = learner.scaled(gradient)
        learner.running.update(averages)
        u, weight, bias = mgg(x, weight, bias)
        stepped = values - learner.config.lr * u
        weight, bias, values = weight.detach(), bias.detach(), stepped.detach()
        learner.set_values(values)
    return total / len(batches)


def _accuracy(learner: MGTTA, mgg: MGG, domains: Domains, lr: float, batch: int) -> float:
    """Mean over the domains of the accuracy while adapting to each from the source model."""
    kept, config = learner.state_dict(), learner.config
    learner.config = replace(config, lr=lr)
    shares = []
    try:
        for images, labels in domains:
            learner.reset()
            learner.use(copy.deepcopy(mgg))
            right = 0
            for x, y in zip(torch.split(images, batch), torch.split(labels, batch), strict=True):
                right += int((learner(x.to(learner.device)).argmax(-1).cpu() == y.cpu()).sum())
            shares.append(right / len(labels))
    finally:
        learner.config = config
        learner.load_state_dict(kept)
    return sum(shares) / len(shares)
