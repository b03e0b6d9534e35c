import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import CenterCrop, Compose, PILToTensor, Resize
from trees import jpeg, make_tree

from moetta.data import (
    Preprocess,
    cifar10,
    corrupted,
    image_folder,
    imagenet,
    imagenet_c,
    imagenet_synsets,
)
from moetta.data.catalogue import SMALL_SETS
from moetta.data.corruptions import corrupt
from moetta.data.datasets import IMAGENET_C_FRAME

PRE = Preprocess((0.5,) * 3, (0.5,) * 3)
SMALL = Preprocess((0.5,) * 3, (0.5,) * 3, size=(32, 32), crop_pct=1.0)
ARCHIVE = Path(__file__).parents[2].parent / "shared" / "data" / "cifar10-images.tar.xz"


def test_any_folder_is_read_in_sorted_order_as_torchvision_does(tmp_path):
    make_tree(tmp_path, ["dog", "cat", "ant"], images=2)
    (tmp_path / "dog" / "notes.txt").write_text("not an image")
    domain = image_folder(tmp_path, PRE, name="pets")
    plain = ImageFolder(tmp_path, Compose([Resize(256), CenterCrop(224), PILToTensor()]))
    assert domain.labels.tolist() == plain.targets == [0, 0, 1, 1, 2, 2]
    for i in range(6):
        assert domain.images[i].equal(plain[i][0])
    pictures, kept, unread = domain.read(torch.tensor([4, 1]))
    assert pictures[0].equal(domain.images[4])
    assert kept.tolist() == [0, 1]
    assert unread == []


@pytest.mark.parametrize(
    ("names", "labels", "said"),
    [
        (["0", "10", "2", "999"], [0, 10, 2, 999], ", labels 'numbers'"),
        (imagenet_synsets("r")[2:4], None, ", labels 'imagenet'"),
        (["dog", "cat", "n01440764"], [0, 1, 2], ""),
    ],
)
def test_a_folder_is_labelled_by_the_names_of_its_classes(tmp_path, names, labels, said):
    make_tree(tmp_path / "f", names)
    domain = image_folder(tmp_path / "f", PRE)
    places = labels or [imagenet_synsets().index(name) for name in sorted(names)]
    assert domain.labels.tolist() == places
    assert domain.origin == f"image folder f{said}"
    plain = image_folder(tmp_path / "f", PRE, labels="sorted")
    assert plain.labels.tolist() == list(range(len(names)))


def test_a_folder_without_classes_says_what_it_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        image_folder(tmp_path / "none", PRE)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        imagenet("val", tmp_path / "none", PRE)
    with pytest.raises(ValueError, match="no data set 'x'; valid: val, r"):
        imagenet("x", tmp_path, PRE)
    with pytest.raises(FileNotFoundError, match="an empty folder"):
        image_folder(tmp_path, PRE)
    (tmp_path / "a.jpg").write_bytes(jpeg())
    with pytest.raises(FileNotFoundError, match=r"1 files \(a.jpg\)"):
        image_folder(tmp_path, PRE)
    (tmp_path / "hollow").mkdir()
    with pytest.raises(FileNotFoundError, match="hollow"):
        image_folder(tmp_path, PRE)


# ---- the ImageNet family


def test_imagenet_labels_are_the_synsets_places_among_the_thousand(tmp_path):
    wnids = imagenet_synsets()
    make_tree(tmp_path / "val", wnids)
    domain = imagenet("val", tmp_path, PRE, partial=True)
    assert domain.labels.equal(torch.arange(1000))
    assert domain.classes is None
    assert domain.images[0].shape == (3, 224, 224)
    assert "1,000 of 50,000" in domain.origin
    assert len(imagenet("val", tmp_path / "val", PRE, partial=True)) == 1000
    with pytest.raises(ValueError, match=r"expected 50,000 images.*found 1,000.*partial=True"):
        imagenet("val", tmp_path, PRE)


@pytest.mark.parametrize("kind", ["r", "a"])
def test_r_and_a_are_labelled_among_the_thousand_and_know_their_200(tmp_path, kind):
    subset = imagenet_synsets(kind)
    make_tree(tmp_path / f"ImageNet-{kind.upper()}", subset)
    (tmp_path / f"ImageNet-{kind.upper()}" / "README.txt").write_text("")
    domain = imagenet(kind, tmp_path, PRE, partial=True)
    expected = [imagenet_synsets().index(w) for w in sorted(subset)]
    assert domain.labels.tolist() == expected
    assert sorted(domain.classes) == expected


def test_v2_folders_are_numbers(tmp_path):
    make_tree(tmp_path / "imagenetv2-matched-frequency-format-val", ["0", "10", "2", "999"])
    domain = imagenet("v2", tmp_path, PRE, partial=True)
    assert domain.labels.tolist() == [0, 10, 2, 999]
    with pytest.raises(FileNotFoundError, match=r"1000 class folders.*found 4"):
        imagenet("v2", tmp_path, PRE)


def test_another_data_set_is_not_taken_for_imagenet_r(tmp_path):
    make_tree(tmp_path, imagenet_synsets())
    with pytest.raises(
        FileNotFoundError, match="ImageNet-R: expected exactly its 200 class folders"
    ):
        imagenet("r", tmp_path, PRE, partial=True)


def test_a_wrong_folder_says_what_was_expected_found_and_to_be_done(tmp_path):
    make_tree(tmp_path, ["cat", "dog"])
    with pytest.raises(FileNotFoundError) as error:
        imagenet("r", tmp_path, PRE)
    said = str(error.value)
    assert "expected 200 class folders" in said
    assert "2 folders (cat, dog)" in said
    assert "imagenet-r.tar" in said
    assert str(tmp_path / "imagenet-r") in said


def test_a_flat_validation_folder_is_explained(tmp_path):
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG").write_bytes(jpeg())
    with pytest.raises(FileNotFoundError, match=r"lie flat.*torchvision\.datasets\.ImageNet"):
        imagenet("val", tmp_path, PRE)


def test_imagenet_c_is_read_as_published_and_not_cropped_again(tmp_path):
    for group, name in (("noise", "shot_noise"), (".", "fog")):
        make_tree(
            tmp_path / "imagenet-c" / group / name / "5", imagenet_synsets()[:3], size=(224, 224)
        )
    shot, fog = imagenet_c(tmp_path, ["shot_noise", "fog"], partial=True)
    assert (shot.name, fog.name) == ("shot_noise", "fog")
    assert fog.labels.tolist() == [0, 1, 2]
    assert fog.corruption is None
    path = tmp_path / "imagenet-c" / "fog" / "5" / imagenet_synsets()[0] / "0.JPEG"
    with Image.open(path) as opened:
        assert fog.images[0].equal(PILToTensor()(opened))
    with pytest.raises(FileNotFoundError, match=r"snow/5/<synset>.*found.*on the fly"):
        imagenet_c(tmp_path, ["snow"], partial=True)
    with pytest.raises(FileNotFoundError, match="expected 1000 synset folders"):
        imagenet_c(tmp_path, ["fog"])
    path.write_bytes(jpeg(256, 224))
    with pytest.raises(ValueError, match=r"0\.JPEG has 256 x 224 pixels, expected 224 x 224"):
        fog.images[0]


def test_a_part_of_a_data_set_may_have_empty_classes(tmp_path):
    val, c = tmp_path / "val", tmp_path / "c" / "fog" / "5"
    for folder in (val, c):
        make_tree(folder, imagenet_synsets()[:2])
        (folder / imagenet_synsets()[2]).mkdir()
    assert imagenet("val", tmp_path, PRE, partial=True).labels.tolist() == [0, 1]
    assert imagenet_c(tmp_path, ["fog"], partial=True)[0].labels.tolist() == [0, 1]
    (tmp_path / "a" / imagenet_synsets("a")[0]).mkdir(parents=True)
    with pytest.raises(ValueError, match="has no images"):
        imagenet("a", tmp_path, PRE, partial=True)


def test_on_the_fly_frames_as_imagenet_c_does_and_numbers_as_the_base(tmp_path):
    make_tree(tmp_path / "val", imagenet_synsets()[:2], images=2, size=(500, 375))
    large = Preprocess((0.5,) * 3, (0.5,) * 3, size=(288, 288), interpolation="bicubic")
    val = imagenet("val", tmp_path, large, partial=True)
    (fog,) = corrupted(val, ["fog"], severity=2, frame=IMAGENET_C_FRAME)
    with Image.open(val.images.path(3)) as opened:
        framed = Compose([Resize(256), CenterCrop(224), PILToTensor()])(opened)
    expected = corrupt(framed[None], "fog", 2, index=[3])
    assert fog.read(torch.tensor([3]))[0].equal(expected)
    assert "on the fly" in fog.origin


# ---- CIFAR-10

CLASSES = list(SMALL_SETS["cifar10"].classes)


def test_cifar10_from_a_tree_of_images(tmp_path):
    make_tree(tmp_path / "test", CLASSES, images=2, size=(32, 32))
    domain = cifar10(tmp_path, partial=True)
    assert domain.labels.tolist() == [i for i in range(10) for _ in range(2)]
    assert domain.images.shape == (20, 3, 32, 32)
    with Image.open(tmp_path / "test" / "bird" / "1.JPEG") as opened:
        assert domain.images[5].equal(PILToTensor()(opened))
    (tmp_path / "test" / "ship" / "0.JPEG").write_bytes(b"")
    pictures, _, unread = cifar10(tmp_path, partial=True).read(torch.arange(20))
    assert len(pictures) == 19
    assert "ship" in unread[0].reason


def test_cifar10_has_its_number_of_images_of_32_pixels(tmp_path):
    make_tree(tmp_path / "test", CLASSES, images=2, size=(32, 32))
    with pytest.raises(ValueError, match=r"expected 10,000 images.*found 20.*partial=True"):
        cifar10(tmp_path)
    assert "20 of 10,000 images" in cifar10(tmp_path, partial=True).origin
    (tmp_path / "test" / "ship" / "0.JPEG").write_bytes(jpeg(40, 40))
    with pytest.raises(ValueError, match=r"ship/0\.JPEG has 40 x 40 pixels, expected 32 x 32"):
        cifar10(tmp_path, partial=True)


def test_cifar10_refuses_other_folders_and_unofficial_pickles(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"test/<class>/\*\.jpg.*found an empty folder"):
        cifar10(tmp_path)
    batches = tmp_path / "cifar-10-batches-py"
    batches.mkdir()
    marker = tmp_path / "executed"
    evil = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    for name in ("test_batch", "batches.meta", *(f"data_batch_{i}" for i in range(1, 6))):
        (batches / name).write_bytes(evil)
    with pytest.raises(FileNotFoundError, match="official checksums"):
        cifar10(tmp_path)
    assert not marker.exists()
    make_tree(tmp_path / "test", ["cat", "dog"])
    with pytest.raises(FileNotFoundError, match="expected the class folders airplane"):
        cifar10(tmp_path)


@pytest.mark.skipif(not ARCHIVE.exists() or not shutil.which("xz"), reason="no CIFAR-10 archive")
def test_the_real_cifar10(tmp_path):
    with subprocess.Popen(["tar", "tf", ARCHIVE], stdout=subprocess.PIPE, text=True) as listing:
        first = listing.stdout.readline()
        listing.kill()
    prefix = "./" if first.startswith("./") else ""
    subprocess.run(["tar", "xf", ARCHIVE, "-C", tmp_path, f"{prefix}test"], check=True)
    domain = cifar10(tmp_path)
    assert domain.labels.bincount().tolist() == [1000] * 10
    assert domain.images.shape == (10_000, 3, 32, 32)
    means = domain.images.float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(means, torch.tensor([0.494, 0.485, 0.450]), rtol=0, atol=0.004)
    assert len(os.listdir(tmp_path)) == 1
