"""Whether traffic is of few classes, by the source model's answers, and what follows from it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moetta.guard.traffic import FEWEST, Traffic, copies
from moetta.guard.watch import Watch

CLASSES = 20


def logits_of(answers: Tensor, sure: Tensor, generator: torch.Generator) -> Tensor:
    """Logits that give each answer with a confidence, and the rest to all others about alike."""
    rest = ((1 - sure) / (CLASSES - 1)).log()
    logits = rest[:, None].repeat(1, CLASSES)
    logits[torch.arange(len(answers)), answers] = sure.log()
    # No two images are the same.
    return logits + 0.3 * torch.randn(logits.shape, generator=generator)


def looks(count: int, few: int, confused: bool, seed: int = 0) -> Traffic:
    """Traffic of ``few`` classes, half of it answered surely and rightly.

    The doubtful answers fall anywhere or, where the model is confused, into two classes.
    """
    generator = torch.Generator().manual_seed(seed)
    traffic = Traffic(CLASSES, 16)
    for _ in range(count):
        right = torch.randint(few, (8,), generator=generator)
        doubtful = torch.randint(2 if confused else CLASSES, (8,), generator=generator)
        sure = torch.cat((torch.full((8,), 0.9), torch.full((8,), 0.3)))
        shuffled = torch.randperm(16, generator=generator)
        traffic.add(logits_of(torch.cat((right, doubtful))[shuffled], sure[shuffled], generator))
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
    # One look more: a few images are mistaken for copies.
    assert looks(FEWEST + 1, 1, confused=False).narrow


def test_it_follows_the_traffic():
    traffic = looks(30, 1, confused=False)
    generator = torch.Generator().manual_seed(1)
    narrow = []
    for _ in range(60):
        sure = 0.1 + 0.85 * torch.rand(16, generator=generator)
        answers = torch.randint(CLASSES, (16,), generator=generator)
        traffic.add(logits_of(answers, sure, generator))
        narrow.append(traffic.narrow)
    assert 5 < narrow.index(False) < 40  # neither at once nor late
    assert not any(narrow[40:])


def test_single_images_are_pooled_into_looks():
    generator = torch.Generator().manual_seed(0)
    one_by_one, whole = Traffic(CLASSES, 16), Traffic(CLASSES, 16)
    logits = torch.randn(200, CLASSES, generator=generator)
    logits[:100, 3] += 5
    logits = logits[torch.randperm(200, generator=generator)]
    for row in logits:
        one_by_one.add(row[None])
    whole.add(logits)
    assert one_by_one.looks == whole.looks == 12
    assert one_by_one.narrow
    for key, value in whole.state().items():
        torch.testing.assert_close(value, one_by_one.state()[key])


# --- how frequent each class is -----------------------------------------------------------------


def gaussian(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Logits of the perfect model of classes that are Gaussians on the corners of a simplex."""
    x = 2 * torch.eye(CLASSES)[labels] + torch.randn(len(labels), CLASSES, generator=generator)
    return 2 * x


def test_frequencies_are_found_and_make_answers_better():
    """Three quarters of the images are of class 4, the others of class 9."""
    generator = torch.Generator().manual_seed(0)
    traffic, labels, plain, informed = Traffic(CLASSES, 16), [], [], []
    for turn in range(60):
        right = torch.where(torch.rand(16, generator=generator) < 0.75, 4, 9)
        logits = gaussian(right, generator)
        traffic.add(logits)
        if turn >= 20:
            labels.append(right)
            plain.append(logits.argmax(1))
            informed.append(traffic.informed(logits).argmax(1))
    found = traffic.images / traffic.images.sum()
    assert 0.6 < found[4] < 0.9
    assert 0.1 < found[9] < 0.4
    truth = torch.cat(labels)
    before, after = ((torch.cat(a) == truth).float().mean().item() for a in (plain, informed))
    assert before < 0.6  # a model that takes all classes to be equally frequent
    assert after > 0.9


def test_equal_frequencies_change_no_answer_by_much():
    generator = torch.Generator().manual_seed(1)
    traffic, same = Traffic(CLASSES, 16), []
    for turn in range(100):
        logits = gaussian(torch.randint(CLASSES, (16,), generator=generator), generator)
        traffic.add(logits)
        if turn >= 50:
            same.append(traffic.informed(logits).argmax(1) == logits.argmax(1))
    assert torch.cat(same).float().mean() > 0.75


def test_no_class_is_ever_ruled_out():
    """After any number of images of one class, an image that is surely of another is one."""
    generator, traffic = torch.Generator().manual_seed(3), Traffic(CLASSES, 16)
    for _ in range(1000):
        traffic.add(logits_of(torch.full((16,), 3), torch.full((16,), 0.99), generator))
    other = logits_of(torch.tensor([7]), torch.tensor([0.9999]), generator)
    assert traffic.informed(other).argmax() == 7


def test_one_image_again_and_again_is_not_traffic_of_one_class():
    """Else whoever sends it could bend the answers to all other images."""
    generator = torch.Generator().manual_seed(2)
    watch, naive = Watch(16, 0.005, 10_000), Traffic(CLASSES, 16)
    image = 30 * torch.eye(CLASSES)[3:4]
    for _ in range(60):
        others = gaussian(torch.randint(CLASSES, (8,), generator=generator), generator)
        both = torch.cat((others, image.expand(8, -1)))
        watch.add(both, both)
        naive.add(both + 0.1 * torch.randn(both.shape, generator=generator))  # no copies
        assert not watch.narrow
    assert naive.narrow
    assert watch.traffic is not None
    assert watch.traffic.images[3] < naive.images[3] / 4
    assert torch.equal(watch.informed(others), others)


def test_copies_of_earlier_images_are_found_in_what_is_new():
    marks = torch.tensor([3.0, 5.0, 3.0, 7.0, 5.0, 7.0, 8.0])
    assert copies(marks).tolist() == [False, False, True, False, True, True, False]
    for start in range(len(marks)):
        assert torch.equal(copies(marks, start), copies(marks)[start:])
