import os

import pytest
import torch
from trees import jpeg, make_tree

from moetta.data import UnreadableImage, cifar10
from moetta.data.cache import cache_folder, cached
from moetta.data.catalogue import SMALL_SETS
from moetta.data.image_files import ImageFiles
from moetta.files import read_safetensors


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOETTA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    """CIFAR-10 with two images per class."""
    make_tree(tmp_path / "test", SMALL_SETS["cifar10"].classes, images=2, size=(32, 32))
    return tmp_path


def read(folder):
    return cifar10(folder, partial=True)


def cached_files():
    return list(cache_folder().rglob("*.safetensors"))


def refuse_decoding(monkeypatch):
    monkeypatch.setattr(ImageFiles, "__getitem__", lambda *_: pytest.fail("decoded again"))


def test_image_files_are_decoded_once(folder, monkeypatch):
    first = read(folder)
    refuse_decoding(monkeypatch)
    second = read(folder)
    assert second.images.equal(first.images)
    assert second.labels.equal(first.labels)
    assert second.origin == first.origin


@pytest.mark.parametrize("change", ["content", "time", "added", "removed", "renamed"])
def test_a_changed_folder_is_decoded_again(folder, change):
    file = folder / "test" / "ship" / "1.JPEG"
    file.write_bytes(jpeg(32, 32, seed=1).ljust(4096))
    before = read(folder)
    if change == "content":
        stat = file.stat()
        file.write_bytes(jpeg(32, 32, seed=9) + b" ")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "time":
        file.write_bytes(jpeg(32, 32, seed=9).ljust(4096))
        os.utime(file, ns=(0, 12345))
    elif change == "added":
        (file.parent / "2.JPEG").write_bytes(jpeg(32, 32, seed=9))
    elif change == "removed":
        file.unlink()
    else:
        file.rename(file.parent / "+.JPEG")  # now before 0.JPEG
    after = read(folder)
    assert after.images.shape != before.images.shape or not after.images.equal(before.images)
    (path,) = cached_files()  # the old images are not kept
    assert len(read_safetensors(path)[0]["images"]) == len(after)


def test_two_folders_are_cached_side_by_side(folder, tmp_path, monkeypatch):
    other = tmp_path / "other"
    make_tree(other / "test", SMALL_SETS["cifar10"].classes, images=1, size=(32, 32))
    first, second = read(folder), read(other)
    refuse_decoding(monkeypatch)
    assert read(folder).images.equal(first.images)
    assert read(other).images.equal(second.images)


def test_a_damaged_file_is_made_again(folder):
    first = read(folder)
    (path,) = cached_files()
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:100])
    assert read(folder).images.equal(first.images)
    assert path.stat().st_size == size


def test_a_read_only_home_costs_time_only(folder, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MOETTA_CACHE", str(blocked))
    with pytest.warns(UserWarning, match="could not be cached"):
        assert len(read(folder)) == 20


def test_large_data_sets_are_not_cached(folder, monkeypatch):
    monkeypatch.setattr("moetta.data.datasets.CACHED_BYTES", 19 * 3072)
    assert len(read(folder).images) == 20
    assert not cache_folder().exists()


def test_an_unreadable_image_is_not_cached_away(folder):
    (folder / "test" / "ship" / "0.JPEG").write_bytes(b"")
    for _ in range(2):
        assert len(read(folder).read(torch.arange(20))[0]) == 19
    with pytest.raises(UnreadableImage, match="ship"):
        read(folder).images.in_memory()


def test_no_part_of_a_file_is_left_by_a_failed_write(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.warns(UserWarning, match="could not be cached: disk full"):
        images, _ = cached("some/key", lambda: (torch.zeros(2, 3, 4, 4), torch.arange(2)))
    assert images.shape == (2, 3, 4, 4)
    assert [p for p in cache_folder().rglob("*") if p.is_file()] == []
