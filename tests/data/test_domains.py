import pytest
import torch

from moetta.data import Domain, UnreadableImage
from moetta.data.corruptions import corrupt


def images_of(n, size=32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, size, size), generator=draw, dtype=torch.uint8)


@pytest.mark.parametrize("corruption", ["gaussian_noise", "frost"])
def test_a_part_of_a_domain_keeps_its_numbers_and_so_its_corrupted_images(corruption):
    clean = images_of(8)
    whole = Domain("d", clean, torch.arange(8), corruption=corruption, severity=3)
    part = whole.take(torch.tensor([6, 1]))
    assert (len(part), part.numbers.tolist(), part.labels.tolist()) == (2, [6, 1], [6, 1])
    images, kept, unread = part.read(torch.tensor([1, 0]), seed=5)
    expected = corrupt(clean[[1, 6]], corruption, 3, index=[1, 6], seed=5)
    assert images.equal(expected)
    assert (kept.tolist(), unread) == ([0, 1], [])


def test_images_read_one_by_one_are_those_of_a_tensor():
    clean = images_of(6)
    rows = torch.tensor([4, 0, 5])
    in_memory, one_by_one = (
        Domain("d", images, torch.arange(6), corruption="shot_noise")
        for images in (clean, [*clean])
    )
    assert one_by_one.read(rows)[0].equal(in_memory.read(rows)[0])
    parts = [domain.take(rows).read(torch.tensor([2, 0]))[0] for domain in (in_memory, one_by_one)]
    assert parts[0].equal(parts[1])


def test_unreadable_images_are_left_out_and_named():
    class Damaged(list):
        def __getitem__(self, i):
            if i == 2:
                raise UnreadableImage("cannot read image 2.jpg: truncated")
            return super().__getitem__(i)

    clean = images_of(4)
    domain = Domain("d", Damaged(clean), torch.arange(4), index=torch.tensor([10, 11, 12, 13]))
    images, kept, (unread,) = domain.read(torch.tensor([3, 2, 0]))
    assert images.equal(clean[[3, 0]])
    assert kept.tolist() == [0, 2]
    assert (unread.domain, unread.index) == ("d", 12)
    assert "2.jpg" in unread.reason


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Domain("d", images_of(3), torch.zeros(2).long()), "3 images"),
        (lambda: Domain("d", images_of(3), torch.zeros(3)), "integers"),
        (lambda: Domain("d", images_of(3), torch.tensor([0, -1, 0])), "negative"),
        (lambda: Domain("d", images_of(0), torch.zeros(0).long()), "no images"),
        (lambda: Domain("d", images_of(3).float(), torch.zeros(3).long()), "uint8"),
        (lambda: Domain("d", images_of(1), torch.zeros(1).long(), "frosty"), "frost"),
        (lambda: Domain("d", images_of(1), torch.zeros(1).long(), "frost", 6), "1 to 5"),
        (lambda: Domain("d", images_of(2), torch.zeros(2).long(), index=torch.ones(1)), "index"),
    ],
)
def test_bad_input_is_refused_with_the_reason(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_images_that_are_not_tensors_are_refused():
    arrays = Domain("d", images_of(2).numpy(), torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"domain 'd'.*ndarray"):
        arrays.read(torch.arange(2))


def test_images_of_several_sizes_in_one_domain_are_refused():
    ragged = Domain("d", [*images_of(2, 32), *images_of(1, 40)], torch.zeros(3).long())
    with pytest.raises(ValueError, match="mixes image sizes"):
        ragged.read(torch.arange(3))
