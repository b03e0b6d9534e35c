import numpy as np
import pytest
import torch
from PIL import Image
from trees import make_tree

from moetta.data import ImageFiles, Preprocess, UnreadableImage, image_folder

SMALL = Preprocess((0.5,) * 3, (0.5,) * 3, size=(32, 32), crop_pct=1.0)


def test_grey_palette_and_transparent_images_become_rgb(tmp_path):
    (tmp_path / "c").mkdir()
    photo = Image.new("RGB", (40, 40), (200, 100, 50))
    for mode, suffix in (("L", "jpg"), ("CMYK", "jpg"), ("P", "png"), ("RGBA", "png")):
        photo.convert(mode).save(tmp_path / "c" / f"{mode}.{suffix}")
    domain = image_folder(tmp_path, SMALL)
    assert {tuple(domain.images[i].shape) for i in range(4)} == {(3, 32, 32)}


def test_sixteen_bits_are_scaled_and_unknown_ranges_refused(tmp_path):
    (tmp_path / "c").mkdir()
    ramp = np.linspace(0, 65535, 32 * 32).reshape(32, 32)
    Image.fromarray(ramp.astype(np.uint16)).save(tmp_path / "c" / "deep.png")
    Image.fromarray((ramp / 65535).astype(np.float32)).save(tmp_path / "c" / "float.tiff")
    Image.fromarray(ramp.astype(np.int32)).save(tmp_path / "c" / "long.tiff")
    images = image_folder(tmp_path, SMALL).images
    assert (images[0].float() - torch.from_numpy(ramp / 257)).abs().max() <= 1
    with pytest.raises(UnreadableImage, match=r"float\.tiff.*floating-point"):
        images[1]
    with pytest.raises(UnreadableImage, match=r"long\.tiff.*32-bit"):
        images[2]


def damage(folder):
    good = sorted(folder.iterdir())[0].read_bytes()
    (folder / "cut.JPEG").write_bytes(good[: len(good) // 2])
    (folder / "empty.JPEG").write_bytes(b"")
    (folder / "text.JPEG").write_text("<html>404</html>")
    (folder / "gone.JPEG").symlink_to(folder / "nowhere")


def test_unreadable_images_are_named(tmp_path):
    make_tree(tmp_path, ["a"])
    damage(tmp_path / "a")
    domain = image_folder(tmp_path, SMALL)
    pictures, kept, unread = domain.read(torch.arange(len(domain)))
    assert len(pictures) == 1
    assert kept.tolist() == [0]
    assert [u.index for u in unread] == [1, 2, 3, 4]
    for u, name in zip(unread, ["cut", "empty", "gone", "text"], strict=True):
        assert str(tmp_path / "a" / f"{name}.JPEG") in u.reason
    with pytest.raises(UnreadableImage, match=r"cut\.JPEG"):
        domain.images[1]


def test_a_fault_of_the_transform_is_not_blamed_on_the_file(tmp_path):
    make_tree(tmp_path, ["a"])
    domain = image_folder(tmp_path, SMALL)

    def broken(_):
        raise ValueError("bug")

    files = ImageFiles(domain.images.root, domain.images.files, broken)
    with pytest.raises(ValueError, match="bug"):
        files[0]
