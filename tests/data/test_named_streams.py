import pytest
import timm
import torch
from trees import make_tree

from moetta.data import Domain, Preprocess, Stream, imagenet_synsets, stream
from moetta.data.corruptions import CLASSICAL, EXTRA

HALF = Preprocess((0.5,) * 3, (0.5,) * 3)


class Numbers:
    """A data set of which only the number of pictures is known; reading one is an error."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        raise AssertionError("no picture may be read")


def full():
    counts = {"val": 50_000, "r": 30_000, "sketch": 50_889, "a": 7_500}
    return {kind: Domain(kind, Numbers(n), torch.arange(n) % 1000) for kind, n in counts.items()}


@pytest.mark.parametrize(
    ("name", "samples", "batches", "last"),
    [
        ("classical", 750_000, 11_719, 48),
        ("potpourri", 838_389, 13_100, 53),
        ("potpourri+", 888_389, 13_882, 5),
        ("validation", 200_000, 3_125, 64),
    ],
)
def test_the_papers_streams_have_the_papers_counts(name, samples, batches, last):
    made = stream(name, full(), preprocess=HALF)
    assert made.samples == samples
    assert len(made) == batches
    assert made.samples - 64 * (batches - 1) == last
    expected = torch.randperm(samples, generator=torch.Generator().manual_seed(42))
    assert made.permutation.equal(expected)
    assert made.card()["stream"] == name
    tail = {"potpourri": ["r", "sketch", "a"], "potpourri+": ["r", "sketch", "a", "val"]}
    names = list(EXTRA) if name == "validation" else [*CLASSICAL, *tail.get(name, [])]
    assert list(made.domain_names) == names
    limited = stream(name, full(), preprocess=HALF, limit=2000, seed=4242)
    assert limited.samples == 2000
    for domain, n in made.counts.items():
        assert abs(limited.counts[domain] - n * 2000 / samples) < 1


def test_the_first_domains_are_in_the_order_of_the_spec():
    assert " ".join(CLASSICAL) == (
        "gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur "
        "snow frost fog brightness contrast elastic_transform pixelate jpeg_compression"
    )
    assert set(EXTRA) == {"speckle_noise", "spatter", "gaussian_blur", "saturate"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("imagenets")
    wnids = imagenet_synsets()
    make_tree(root / "imagenet-val", wnids[:4])
    make_tree(root / "imagenet-r", imagenet_synsets("r")[:3])
    make_tree(root / "imagenet-sketch", wnids[5:7])
    make_tree(root / "imagenet-a", imagenet_synsets("a")[:2])
    return root


def test_potpourri_plus_from_folders_end_to_end(root):
    model = timm.create_model("vit_tiny_patch16_224")
    made = stream("potpourri+", root, model=model, preprocess="paper", partial=True, mask=True)
    assert made.samples == 15 * 4 + 3 + 2 + 2 + 4
    batches = list(made)
    images = torch.cat([b.images for b in batches])
    assert images.shape == (71, 3, 224, 224)
    assert images.min() >= -1
    assert images.max() <= 1
    card = made.card()
    assert card["preprocessing"]["source"].startswith("paper")
    assert card["mask"] is True
    assert card["domains"][0]["corruption"] == "gaussian_noise"
    assert "on the fly" in card["domains"][0]["origin"]
    assert card["domains"][-1]["name"] == "imagenet"


@pytest.mark.parametrize("by_key", [False, True])
def test_absent_data_sets_are_left_out_of_a_part_and_named(tmp_path, by_key):
    val = make_tree(tmp_path / "imagenet-val", imagenet_synsets()[:2])
    for roots in [{"val": val}] if by_key else [tmp_path, val]:
        with pytest.raises(FileNotFoundError, match=r"imagenet-r\.tar.*found.*partial=True"):
            stream("potpourri+", roots, preprocess=HALF)
        with pytest.warns(UserWarning, match="without ImageNet-R, ImageNet-Sketch, ImageNet-A"):
            made = stream("potpourri+", roots, preprocess=HALF, partial=True)
        assert made.domain_names == (*CLASSICAL, "imagenet")
        card = made.card()
        assert card["left_out"] == ["ImageNet-R", "ImageNet-Sketch", "ImageNet-A"]
        assert "left_out" not in stream("classical", roots, preprocess=HALF, partial=True).card()
    with pytest.raises((FileNotFoundError, ValueError), match="val"):  # the heart of every stream
        stream("potpourri", {} if by_key else tmp_path / "no", preprocess=HALF, partial=True)


def test_imagenet_c_files_are_used_where_there_are_any(root, tmp_path):
    for name in EXTRA:
        make_tree(tmp_path / name / "5", imagenet_synsets()[:2], size=(224, 224))
    roots = {"val": root / "imagenet-val", "c": tmp_path}
    options = {"preprocess": HALF, "partial": True}
    files = stream("validation", roots, **options)
    assert files.samples == 8
    assert "files" in files.card()["domains"][0]["origin"]
    fly = stream("validation", roots, corruptions="on the fly", **options)
    assert fly.samples == 16
    with pytest.raises(FileNotFoundError, match="gaussian_noise/5"):
        stream("classical", roots, **options)
    with pytest.raises(FileNotFoundError, match="on the fly"):
        stream("classical", root, corruptions="files", **options)


def test_cifar10_c_is_made_at_its_own_size_and_resized_for_the_model():
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (4, 3, 32, 32), generator=draw, dtype=torch.uint8)
    clean = Domain("cifar10", pixels, torch.arange(4))
    made = stream("cifar10-c", {"cifar10": clean}, model="vit_tiny_patch16_224")
    assert made.samples == 60
    assert next(iter(made)).images.shape == (60, 3, 224, 224)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: stream("clasical", ".", preprocess=HALF),
            "no stream 'clasical'; did you mean 'classical'",
        ),
        (lambda: stream("classical", {}, preprocess=HALF), "needs a folder for 'val'"),
        (lambda: stream("classical", ".", preprocess="model"), "needs a model"),
        (lambda: stream("classical", ".", preprocess=HALF, size=3), "follows from"),
        (lambda: stream("classical", ".", preprocess=HALF, corruptions="some"), "on the fly"),
        (lambda: stream("classical", full(), preprocess=HALF, order="random"), "no order"),
        (lambda: stream("classical", ".", model="convnext_atto", preprocess=HALF), "0.485"),
    ],
)
def test_bad_input_is_refused_with_the_reason(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_an_order_beyond_the_paper_on_the_papers_data():
    made = stream("classical", full(), preprocess=HALF, order="bursts", limit=5000, batch_size=1)
    assert isinstance(made, Stream)
    assert len(made) == 5000
    assert made.card()["order"]["name"] == "bursts"
