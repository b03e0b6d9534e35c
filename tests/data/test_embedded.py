import pytest
import torch
from safetensors.torch import save as to_bytes

from moetta.data import embedded
from moetta.data.cache import cache_folder
from moetta.data.corruptions import CLASSICAL, EXTRA
from moetta.data.embedded import compose, compositions, styles


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOETTA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def small(monkeypatch):
    counts = {"c": 20, "r": 24, "sketch": 24, "a": 8, "clean": 20, "extra": 12}
    monkeypatch.setattr(compositions, "COUNTS", counts)
    return counts


def test_no_digit_is_in_both_splits():
    train, test = (compose.digits(split)[0].flatten(1) for split in ("train", "test"))
    assert len(train) + len(test) == 1797
    assert torch.cdist(train, test).min() > 0


def test_the_splits_hold_every_digit_in_similar_shares():
    for split, share in (("train", 0.6), ("test", 0.4)):
        counts = compose.digits(split)[2]
        assert (counts - share * 179.7).abs().max() < 6


@pytest.mark.parametrize("make", [compose.paint, styles.rendition, styles.sketch])
def test_an_image_depends_only_on_its_number(make):
    whole = make(compose.scene(torch.arange(40), split="test", seed=3))
    few = make(compose.scene(torch.tensor([31, 7]), split="test", seed=3))
    assert torch.equal(whole[[31, 7]], few)
    other = make(compose.scene(torch.tensor([31, 7]), split="test", seed=4))
    assert not torch.equal(few, other)


def test_classes_are_uniform_and_name_the_digits_shown():
    view = compose.scene(torch.arange(5000), split="train", seed=0)
    counts = torch.bincount(view.labels, minlength=100)
    assert counts.min() > 20
    assert counts.max() < 90
    # A zero has a hole where it is centred and a one has ink: the label and the strokes agree.
    left, right = view.ink[:, 0, 13:19, 8:12], view.ink[:, 0, 13:19, 20:24]
    for part, digit in ((left, view.labels // 10), (right, view.labels % 10)):
        assert part[digit == 0].mean() + 0.3 < part[digit == 1].mean()


def test_strokes_stand_out_from_the_background():
    view = compose.scene(torch.arange(500), split="train", seed=0)
    luma = compose.paint(view).float().mean(1, keepdim=True) / 255
    on, off = (view.ink > 0.9).float(), (view.ink < 0.1).float()
    gap = (luma * on).sum((1, 2, 3)) / on.sum((1, 2, 3)) - (luma * off).sum((1, 2, 3)) / off.sum(
        (1, 2, 3)
    )
    assert (gap < -0.05).float().mean() > 0.98
    assert gap.mean() > -0.45  # pale enough for noise and fog to matter


def test_a_sketch_is_an_outline_on_light_paper():
    view = compose.scene(torch.arange(100), split="test", seed=0)
    grey = styles.sketch(view).float().mean(1, keepdim=True) / 255
    inside, away = view.ink > 0.98, styles._spread(view.ink, 2) < 0.05
    rim = (styles._spread(view.ink, 1) - view.ink) > 0.6
    assert grey[away].mean() > 0.8
    assert grey[inside].mean() > 0.7
    assert grey[rim].mean() < 0.5


def test_streams_keep_the_papers_proportions():
    stream = embedded.stream("potpourri+")
    paper = {"c": 50_000, "r": 30_000, "sketch": 50_889, "a": 7_500, "clean": 50_000}
    for name, count in stream.counts.items():
        assert count / 960 == pytest.approx(paper[name.split("/")[0]] / 50_000, abs=0.01)
    assert stream.domain_names == (*(f"c/{n}" for n in CLASSICAL), "r", "sketch", "a", "clean")
    assert stream.samples == 17057


def test_the_validation_stream_is_the_extra_corruptions_only(small):
    stream = embedded.stream("validation")
    assert stream.domain_names == tuple(f"extra/{n}" for n in EXTRA)
    batch = next(iter(stream))
    assert batch.images.shape[1:] == (3, 32, 32)
    assert batch.images.abs().max() <= 2.0  # normalised by 0.5 and 0.25


def test_a_corrupted_domain_is_the_clean_one_corrupted_more_at_higher_severity(small):
    clean = embedded.domain("clean")
    distance = []
    for severity in (1, 3, 5):
        noisy = embedded.domain("c/gaussian_noise", severity=severity)
        assert torch.equal(noisy.labels, clean.labels)
        distance.append((noisy.images.float() - clean.images.float()).abs().mean())
    assert distance[0] < distance[1] < distance[2]


def test_the_second_time_comes_from_the_cache(small):
    first = embedded.domain("r")
    (path,) = cache_folder().rglob("r.safetensors")
    marked = torch.full_like(first.images, 7)
    path.write_bytes(to_bytes({"images": marked, "labels": first.labels}))
    second = embedded.domain("r")
    assert torch.equal(second.images, marked)
    assert torch.equal(second.labels, first.labels)


def test_a_damaged_cache_file_is_made_again(small):
    first = embedded.domain("sketch")
    (path,) = cache_folder().rglob("sketch.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    assert torch.equal(embedded.domain("sketch").images, first.images)
    assert path.stat().st_size > 1000


def test_a_cache_that_cannot_be_written_costs_no_result(small, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MOETTA_CACHE", str(blocked))
    with pytest.warns(UserWarning, match="could not be cached"):
        assert len(embedded.domain("r")) == small["r"]


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("MOETTA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "moetta"


@pytest.mark.parametrize("name", ["c/gaussian_noise", "c/frost", "r", "sketch", "a", "clean"])
def test_a_longer_domain_goes_on_where_the_usual_one_ends(small, name):
    usual = embedded.domain(name)
    longer = embedded.domain(name, count=100)
    rows = torch.arange(len(usual))
    assert longer.read(rows)[0].equal(usual.images)
    assert longer.labels[rows].equal(usual.labels)
    whole = longer.read(torch.arange(100))[0].flatten(1)
    assert len(whole.unique(dim=0)) == 100  # none repeats
    few = longer.read(torch.tensor([99, 3]))[0]
    assert few.flatten(1).equal(whole[[99, 3]])
    assert embedded.domain(name, count=5).images.equal(usual.images[:5])


def test_labels_of_longer_domains_are_those_of_their_images(small, monkeypatch):
    longer = {name: embedded.domain(name, count=60) for name in ("a", "r", "extra/spatter")}
    monkeypatch.setattr(compositions, "COUNTS", dict.fromkeys(small, 60))
    for name, domain in longer.items():
        usual = embedded.domain(name)  # its labels come with its images
        assert domain.labels.equal(usual.labels)
        assert domain.read(torch.arange(60))[0].equal(usual.images)


def test_a_longer_stream_keeps_the_proportions_and_says_its_length(small):
    plain = embedded.stream("potpourri+")
    tenfold = embedded.stream("potpourri+", length=10 * plain.samples)
    assert tenfold.counts == {name: 10 * n for name, n in plain.counts.items()}
    assert tenfold.card()["length"] == 10 * plain.samples
    assert "length" not in plain.card()
    shorter = embedded.stream("potpourri+", length=100)
    for name, n in shorter.counts.items():
        assert abs(n - plain.counts[name] * 100 / plain.samples) < 1
    assert tenfold.samples == len(set(tenfold.permutation.tolist()))


@pytest.mark.parametrize("order", ["mixed", "gradual", "bursts"])
def test_any_batch_of_a_longer_stream_can_be_read_by_itself(small, order):
    stream = embedded.stream("potpourri", length=2000, order=order)
    whole = list(stream)
    for a, b in zip(whole[29:], stream.starting_at(29), strict=True):
        assert a.images.equal(b.images)
        assert a.labels.equal(b.labels)
    again = embedded.stream("potpourri", length=2000, order=order, workers=1, start=30)
    assert next(iter(again)).images.equal(whole[30].images)


def test_a_hundredfold_stream_holds_no_images():
    stream = embedded.stream("potpourri+", length=1_705_700)
    assert stream.samples == 1_705_700
    assert stream.counts["a"] == 14_400
    assert not any(isinstance(domain.images, torch.Tensor) for domain in stream.domains)
    assert not cache_folder().exists()  # nor were the usual ones made


def test_the_hard_cases_set_the_greatest_length():
    with pytest.raises(ValueError, match=r"14,400 hard cases.*'classical' has no such limit"):
        embedded.stream("potpourri", length=2_000_000)
    with pytest.raises(ValueError, match="one image for each of the 18 domains, got 10"):
        embedded.stream("potpourri", length=10)


def test_source_images_are_training_digits_in_the_models_units():
    images = embedded.source_images(300, seed=1)
    assert images.shape == (300, 3, 32, 32)
    assert -2 <= images.min() < images.max() <= 2
    assert 0 < images.mean() < 0.8
    assert 0.4 < images.std() < 1.2
    assert torch.equal(images[:10], embedded.source_images(10, seed=1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: embedded.stream("imagenet"), "no stream 'imagenet'"),
        (lambda: embedded.domain("c/rain"), "no domain 'c/rain'"),
        (lambda: embedded.domain("r", severity=6), "severity must be 1 to 5"),
        (lambda: embedded.source_images(0), "at least 1"),
        (lambda: compose.digits("all"), "split must be 'train' or 'test'"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
