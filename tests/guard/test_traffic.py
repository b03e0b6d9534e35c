"""Whether traffic is of few classes, told by the source model's sure and doubtful answers."""

from __future__ import annotations

import pytest
import torch

from moetta.guard.traffic import FEWEST, Traffic

CLASSES = 20


def looks(count: int, few: int, confused: bool, seed: int = 0) -> Traffic:
    """Traffic of ``few`` classes, half of it answered surely and rightly.

    The doubtful answers fall anywhere or, where the model is confused, into two classes.
    """
    generator = torch.Generator().manual_seed(seed)
    traffic = Traffic(CLASSES)
    for _ in range(count):
        right = torch.randint(few, (8,), generator=generator)
        doubtful = torch.randint(2 if confused else CLASSES, (8,), generator=generator)
        sure = torch.cat((torch.full((8,), 0.9), torch.full((8,), 0.3)))
        shuffled = torch.randperm(16, generator=generator)
        traffic.add(torch.cat((right, doubtful))[shuffled], sure[shuffled])
    return traffic


@pytest.mark.parametrize("seed", range(5))
def test_images_of_one_class_are_narrow_traffic(seed: int):
    assert looks(30, 1, confused=False, seed=seed).narrow


@pytest.mark.parametrize("seed", range(5))
def test_images_of_all_classes_are_not(seed: int):
    assert not looks(30, CLASSES, confused=False, seed=seed).narrow
    assert not looks(30, CLASSES, confused=True, seed=seed).narrow


def test_it_says_nothing_at_first():
    assert not looks(FEWEST - 1, 1, confused=False).narrow
    assert looks(FEWEST, 1, confused=False).narrow


def test_it_follows_the_traffic():
    traffic = looks(30, 1, confused=False)
    generator = torch.Generator().manual_seed(1)
    narrow = []
    for _ in range(60):
        sure = torch.rand(16, generator=generator)
        traffic.add(torch.randint(CLASSES, (16,), generator=generator), sure)
        narrow.append(traffic.narrow)
    assert 5 < narrow.index(False) < 40  # neither at once nor late
    assert not any(narrow[40:])


def test_a_look_of_one_image_says_nothing():
    traffic = Traffic(CLASSES)
    for _ in range(20):
        traffic.add(torch.tensor([3]), torch.tensor([0.5]))
    assert not traffic.narrow
