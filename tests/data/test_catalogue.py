import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from PIL import Image

from moetta.data import catalogue, embedded, small_set, source_images, stream, stream_spec
from moetta.data.catalogue import SMALL_SETS, STREAMS, CleanImages, spec_of_card
from moetta.data.datasets import imagenet_synsets
from moetta.data.preprocess import Preprocess

PRE = Preprocess((0.5,) * 3, (0.5,) * 3, size=(32, 32), crop_pct=1.0)


def test_the_catalogue_is_read_without_torch():
    code = (
        "import sys, types; root = types.ModuleType('moetta'); root.__path__ = sys.argv[1:]; "
        "sys.modules['moetta'] = root; import moetta.data.catalogue as c; "
        "assert c.stream_spec('cifar10-c', 'x').counterpart == 'classical'; "
        "assert not {'torch', 'torchvision', 'timm', 'numpy'} & set(sys.modules)"
    )
    folder = catalogue.__file__.rsplit("/", 2)[0]
    subprocess.run([sys.executable, "-c", code, folder], check=True)


def test_every_spec_is_consistent():
    names = [(spec.name, spec.embedded) for spec in STREAMS]
    assert len(set(names)) == len(names) == len({spec.card_name for spec in STREAMS})
    for spec in STREAMS:
        assert spec_of_card(spec.card_name) is spec
        if spec.counterpart is not None:
            paper = stream_spec(spec.counterpart, "data")
            assert paper.counterpart == paper.name  # the paper's own stream


def test_embedded_counts_are_those_of_the_domains():
    for spec in STREAMS:
        if spec.embedded:
            made = embedded.domains(spec.name)
            assert sum(map(len, made)) == spec.images
            assert max(int(d.labels.max()) for d in made) == spec.classes - 1


def test_hints_name_the_first_class_folder():
    for data in catalogue.IMAGENET_SETS.values():
        kind = data.class_folders
        assert data.first_folder == ("0" if kind == "numbers" else imagenet_synsets(kind)[0])


def test_what_to_download_includes_the_clean_images():
    said = stream_spec("classical", "d").to_download("d")
    assert [text.split(":")[0] for text in said] == ["ImageNet-C", "ImageNet validation"]
    assert "d/imagenet-val/n01440764 exists" in said[1]
    (said,) = stream_spec("cifar10-c", "d").to_download("d")
    assert said.endswith("so that d/cifar-10-batches-py exists")
    assert stream_spec("potpourri+").to_download("d") == []


def test_a_wrong_name_gets_the_nearest_and_a_missing_folder_is_asked_for():
    with pytest.raises(ValueError, match="no stream 'potpouri'; did you mean 'potpourri'"):
        stream_spec("potpouri")
    with pytest.raises(ValueError, match=r"stream 'cifar10-c' needs --data.*embedded.*potpourri"):
        stream_spec("cifar10-c")


def test_options_that_change_nothing_are_known():
    assert stream_spec("classical").options == {"severity"}
    assert "mask" in stream_spec("potpourri", "data").options
    assert "mask" not in stream_spec("cifar10-c", "data").options


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """A data set that is known to the catalogue alone: three classes of two images each."""
    toys = replace(
        SMALL_SETS["cifar10"],
        title="Toys",
        classes=("zebra", "ball", "car"),  # the official order need not be sorted
        images={"train": 6, "test": 6},
        archive="toys-py",
    )
    monkeypatch.setitem(SMALL_SETS, "toys", toys)
    monkeypatch.setenv("MOETTA_CACHE", str(tmp_path / "cache"))
    clean = CleanImages("toys", "Toys training images")
    spec = replace(stream_spec("cifar10-c", ""), name="toys-c", parts=("toys-c",), clean=clean)
    monkeypatch.setattr(catalogue, "STREAMS", (*STREAMS, spec))
    for split in ("train", "test"):
        for i, name in enumerate(toys.classes):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for j in range(2):
                image = Image.new("RGB", (32, 32), (20 * i, 50 * j, len(split)))
                image.save(tmp_path / "data" / split / name / f"{j}.png")
    return tmp_path / "data"


def test_a_data_set_of_a_known_layout_is_an_entry_of_the_catalogue(toys):
    made = stream("toys-c", toys, preprocess=PRE)
    assert made.samples == 90
    assert made.card()["stream"] == "toys-c"
    assert sorted(small_set("toys", toys).labels.tolist()) == [0, 0, 1, 1, 2, 2]
    zebras = small_set("toys", toys).labels == 0
    assert (small_set("toys", toys).images[zebras][:, 0] == 0).all()
    spec = stream_spec("toys-c", toys)
    assert "toys-py" in spec.to_download(toys)[0]
    images = torch.cat(list(source_images(spec, toys, 4, PRE)))
    assert images.shape == (4, 3, 32, 32)
    blue = (images[:, 2] * 0.5 + 0.5) * 255
    assert blue.round().unique().tolist() == [len("train")]
    again = torch.cat(list(source_images(spec, toys, 4, PRE)))
    assert images.equal(again)


def test_source_images_of_an_embedded_stream_are_training_digits():
    images = source_images(stream_spec("classical"), None, 8, None)
    assert images.equal(embedded.source_images(8))
