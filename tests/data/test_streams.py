import json

import pytest
import torch

from moetta.data import Domain, LabelShift, Stream, UnreadableImage

HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def images_of(n, size=32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, size, size), generator=draw, dtype=torch.uint8)


def three(size=32):
    return [
        Domain("noise", images_of(40, size), torch.arange(40) % 4, corruption="gaussian_noise"),
        Domain("frost", images_of(40, size), torch.arange(40) % 4, corruption="frost", severity=3),
        Domain("clean", images_of(9, size, seed=1), torch.arange(9) % 4),
    ]


def gather(stream):
    batches = list(stream)
    return [
        torch.cat([getattr(b, k) for b in batches])
        for k in ("images", "labels", "domains", "index")
    ]


class Lazy:
    """Images that are made when asked for, of which some cannot be read."""

    def __init__(self, images, bad=()):
        self.images, self.bad = images, bad

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        if i in self.bad:
            raise UnreadableImage(f"cannot read image photo-{i}.jpg: truncated")
        return self.images[i]


@pytest.mark.parametrize("order", ["mixed", "continual", "gradual", "label_shift", "bursts"])
def test_the_batches_do_not_depend_on_the_number_of_workers(order):
    here, there = (
        gather(Stream(three(), order=order, batch_size=16, normalise=HALF, workers=w))
        for w in (0, 2)
    )
    for a, b in zip(here, there, strict=True):
        assert a.equal(b)


def test_the_parts_of_a_batch_make_up_the_batch():
    stream = Stream(three(), batch_size=44, normalise=HALF)  # 44, 44 and 1
    whole = list(stream)
    parts = [list(stream.part(rank, 3)) for rank in range(3)]
    assert [[len(b) for b in part] for part in parts] == [[15, 15, 1], [15, 15, 1], [14, 14, 1]]
    for number, batch in enumerate(whole[:2]):
        for name in ("images", "labels", "domains", "index"):
            joined = torch.cat([getattr(part[number], name) for part in parts])
            assert joined.equal(getattr(batch, name))
    # A part without an image holds the first of its batch, so that its size is known.
    assert all(part[2].images.equal(whole[2].images) for part in parts)
    (last,) = stream.part(1, 3).starting_at(2)
    assert last.number == 2
    assert len(stream.part(0, 1)) == len(stream)


def test_each_batch_carries_images_labels_domains_and_positions():
    stream = Stream(three(), batch_size=64, normalise=((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    assert (len(stream), stream.batches, stream.samples) == (2, 2, 89)
    first, last = stream
    assert (len(first), len(last)) == (64, 25)  # the short last batch is kept
    assert (first.number, last.number) == (0, 1)
    assert first.images.dtype == torch.float32
    assert first.labels.dtype == first.domains.dtype == first.index.dtype == torch.int64
    images, labels, domains, index = gather(stream)
    assert index.equal(stream.permutation)
    assert domains.equal(torch.where(index < 40, 0, torch.where(index < 80, 1, 2)))
    assert labels.equal((index - torch.tensor([0, 40, 80])[domains]) % 4)
    clean = images_of(9, seed=1)[index[domains == 2] - 80].float() / 255
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.5, 0.6])
    expected = (clean - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(images[domains == 2], expected, rtol=0, atol=1e-6)


def test_an_image_is_the_same_in_any_order_batch_or_subset():
    by_position = []
    for options in ({"batch_size": 64}, {"batch_size": 1, "order": "continual", "seed": 7}):
        images, _, _, index = gather(Stream(three(), normalise=HALF, **options))
        by_position.append(images[index.argsort()])
    assert by_position[0].equal(by_position[1])
    images, _, _, index = gather(Stream(three(), normalise=HALF, limit=20))
    assert images.equal(by_position[0][index])
    noise = three()[0].take(torch.tensor([5, 30]))
    assert noise.read(torch.tensor([1]))[0].equal(three()[0].read(torch.tensor([30]))[0])
    other = gather(Stream(three(), normalise=HALF, corruption_seed=1))
    assert not other[0][other[3].argsort()].equal(by_position[0])


def test_the_order_is_that_of_the_seed_and_neither_uses_nor_moves_the_global_generator():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    runs = [gather(Stream(three(), normalise=HALF, seed=5, workers=w)) for w in (0, 1)]
    assert torch.get_rng_state().equal(state)
    torch.manual_seed(99)
    assert gather(Stream(three(), normalise=HALF, seed=5))[3].equal(runs[0][3])
    assert not Stream(three(), normalise=HALF, seed=6).permutation.equal(runs[0][3])


def test_it_resumes_at_any_batch():
    whole = list(Stream(three(), batch_size=10, normalise=HALF))
    rest = Stream(three(), batch_size=10, normalise=HALF, start=6)
    assert len(rest) == 3
    for a, b in zip(whole[6:], rest, strict=True):
        assert a.number == b.number
        assert a.images.equal(b.images)
    assert list(Stream(three(), normalise=HALF, start=2)) == []


@pytest.mark.parametrize("order", ["mixed", "gradual", "label_shift"])
def test_starting_at_reads_the_same_stream_from_that_batch_on(order):
    stream = Stream(three(), batch_size=10, order=order, normalise=HALF, limit=70)
    whole, rest = list(stream), stream.starting_at(4)
    assert (len(rest), rest.batches, rest.samples) == (3, 7, 70)
    for a, b in zip(whole[4:], rest, strict=True):
        assert a.number == b.number
        for part in ("images", "labels", "domains", "index"):
            assert getattr(a, part).equal(getattr(b, part))
    assert rest.card() == stream.card()
    assert len(stream) == 7  # the stream itself still starts at its own first batch
    assert len(rest.starting_at(0)) == 7
    assert list(stream.starting_at(7)) == []
    for batch in (-1, 8):
        with pytest.raises(
            ValueError, match=rf"start must be between 0 and 7 batches, got {batch}"
        ):
            stream.starting_at(batch)


def test_starting_at_lists_nothing_and_draws_nothing_again():
    drawn = []

    def counting(domains, labels, seed):
        drawn.append(seed)
        return torch.arange(len(labels))

    stream = Stream(three(), batch_size=10, order=counting, normalise=HALF)
    rest = stream.starting_at(3)
    assert all(a is b for a, b in zip(rest.domains, stream.domains, strict=True))
    assert drawn == [42]


def test_starting_at_counts_its_own_skipped_images():
    domain = Domain("d", Lazy(images_of(6), bad={0, 5}), torch.zeros(6).long())
    stream = Stream([domain], batch_size=1, on_error="skip", order=first_to_last, normalise=HALF)
    rest = stream.starting_at(3)
    with pytest.warns(UserWarning, match="skipped"):
        list(rest)
    assert [u.index for u in rest.skipped] == [5]
    assert stream.skipped == []


def first_to_last(domains, labels, seed):
    return torch.arange(len(labels))


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_images_are_listed_and_move_no_other_sample(workers):
    images = images_of(30)
    sound = Domain("d", images, torch.arange(30) % 3)
    holes = Domain("d", Lazy(images, bad={3, 4, 5, 17}), torch.arange(30) % 3)
    options = {"batch_size": 2, "order": "mixed", "normalise": HALF}
    stream = Stream([holes], on_error="skip", workers=workers, **options)
    with pytest.warns(UserWarning, match="skipped: cannot read") as warned:
        got = list(stream)
    assert any("photo-17.jpg" in str(w.message) for w in warned)
    assert {u.index for u in stream.skipped} == {3, 4, 5, 17}
    assert all(u.domain == "d" and f"photo-{u.index}" in u.reason for u in stream.skipped)
    assert stream.card()["skipped"][0]["domain"] == "d"
    whole = {b.number: b for b in Stream([sound], **options)}
    for batch in got:
        keep = [i not in {3, 4, 5, 17} for i in whole[batch.number].index.tolist()]
        assert batch.index.tolist() == whole[batch.number].index[keep].tolist()
        assert batch.images.equal(whole[batch.number].images[keep])
    assert sum(map(len, got)) == 26
    list(stream)
    assert len(stream.skipped) == 4  # a second pass does not count them twice


def test_a_batch_in_which_nothing_can_be_read_is_left_out():
    domain = Domain("d", Lazy(images_of(4), bad={0, 1}), torch.zeros(4).long())
    stream = Stream([domain], batch_size=1, on_error="skip", order="continual", normalise=HALF)
    with pytest.warns(UserWarning, match="skipped: cannot read"):
        assert sorted(int(b.index) for b in stream) == [2, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_fatal_by_default(workers):
    domain = Domain("d", Lazy(images_of(4), bad={2}), torch.zeros(4).long())
    with pytest.raises(UnreadableImage, match=r"photo-2\.jpg.*truncated"):
        list(Stream([domain], normalise=HALF, workers=workers))


def test_images_are_resized_after_the_corruption():
    small = Stream(three(), normalise=HALF, batch_size=89)
    large = Stream(three(), normalise=HALF, batch_size=89, size=64)
    (a,), (b,) = small, large
    assert b.images.shape == (89, 3, 64, 64)
    shrunk = torch.nn.functional.avg_pool2d(b.images, 2)
    assert (shrunk - a.images).abs().mean() < 0.25  # else 0.5 and more
    mixed = [three()[0], Domain("big", images_of(5, 48), torch.zeros(5).long())]
    with pytest.raises(ValueError, match="differ in image size"):
        list(Stream(mixed, normalise=HALF))
    assert next(iter(Stream(mixed, normalise=HALF, size=(48, 40)))).images.shape[2:] == (48, 40)
    apart = Stream(mixed, normalise=HALF, order="continual", batch_size=20)  # never in one batch
    with pytest.raises(ValueError, match=r"differ.*noise: 32 x 32; big: 48 x 48"):
        list(apart)


def test_a_wrong_frost_folder_is_refused_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"frost1\.png"):
        Stream(three(), normalise=HALF, frost_folder=tmp_path)


def test_limit_keeps_proportions_and_counts_say_so():
    stream = Stream(three(), normalise=HALF, limit=20)
    assert stream.samples == 20
    assert stream.counts["clean"] in (2, 3)
    assert sum(stream.counts.values()) == 20
    assert Stream(three(), normalise=HALF, limit=10**9).samples == 89


def test_length_is_exact_and_cannot_exceed_the_data():
    stream = Stream(three(), normalise=HALF, length=20)
    assert stream.samples == stream.card()["length"] == 20
    assert stream.permutation.equal(Stream(three(), normalise=HALF, limit=20).permutation)
    assert "length" not in Stream(three(), normalise=HALF, limit=20).card()
    whole = Stream(three(), normalise=HALF, length=89)
    assert whole.permutation.equal(Stream(three(), normalise=HALF).permutation)
    for length in (0, 90):
        with pytest.raises(ValueError, match=f"between 1 and the 89 images.*got {length}"):
            Stream(three(), normalise=HALF, length=length)
    with pytest.raises(ValueError, match="length or a limit, not both"):
        Stream(three(), normalise=HALF, length=20, limit=10)


def test_the_card_is_json_and_says_what_a_result_depends_on():
    stream = Stream(
        three(),
        order=LabelShift(gamma=0.5),
        seed=3,
        batch_size=8,
        limit=50,
        normalise=HALF,
        corruption_seed=9,
        mask=True,
    )
    card = json.loads(json.dumps(stream.card()))
    assert card["order"] == {"name": "label_shift", "gamma": 0.5, "slots": 0}
    assert [d["name"] for d in card["domains"]] == ["noise", "frost", "clean"]
    assert sum(d["samples"] for d in card["domains"]) == card["samples"] == 50
    assert card["domains"][1]["corruption"] == "frost"
    assert card["domains"][1]["severity"] == 3
    assert card["domains"][2]["severity"] is None
    assert (card["seed"], card["batch_size"], card["limit"]) == (3, 8, 50)
    assert (card["mask"], card["corruption_seed"]) == (True, 9)
    assert card["preprocessing"]["mean"] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Stream([], normalise=HALF), "at least one domain"),
        (lambda: Stream([three()[0], three()[0]], normalise=HALF), "unique.*noise"),
        (lambda: Stream(three(), normalise=HALF, batch_size=0), "batch_size must be at least 1"),
        (lambda: Stream(three(), normalise=HALF, workers=-1), "workers"),
        (
            lambda: Stream(three(), normalise=HALF, start=3),
            "start must be between 0 and 2 batches, got 3",
        ),
        (lambda: Stream(three(), normalise=HALF, start=-1), "start must be at least 0"),
        (lambda: Stream(three(), normalise=HALF, seed=-1), "seed must be at least 0"),
        (lambda: Stream(three(), normalise=HALF, limit=0), "at least 1"),
        (lambda: Stream(three(), normalise=HALF, order="shuffled"), "no order 'shuffled'"),
        (lambda: Stream(three(), normalise=HALF, on_error="ignore"), "on_error"),
        (lambda: Stream(three(), normalise=((0.5,), (0.5,))), "3 numbers"),
        (lambda: Stream(three(), normalise=((0.5,) * 3, (0.5, 0, 0.5))), "positive std"),
    ],
)
def test_bad_input_is_refused_with_the_reason(make, says):
    with pytest.raises(ValueError, match=says):
        make()
