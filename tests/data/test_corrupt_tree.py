import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor
from trees import jpeg

from moetta.data import Preprocess, image_folder
from moetta.data.corrupt_tree import CorruptOptions, corrupt_tree, find_images
from moetta.data.corruptions import CLASSICAL, corrupt

NAMES = ("gaussian_noise", "jpeg_compression", "fog")


@pytest.fixture
def source(tmp_path):
    """Two classes of three photographs of different shapes, one of them greyscale."""
    src = tmp_path / "val"
    for c in range(2):
        folder = src / f"n0{c}"
        folder.mkdir(parents=True)
        for i in range(3):
            y, x = np.mgrid[0 : 60 + 10 * i, 0 : 80 - 7 * i]
            array = np.stack([y * 3, x * 3, (x + y) * (c + 1)], -1).astype(np.uint8)
            picture = Image.fromarray(array)
            if i == 2:
                picture = picture.convert("L")
            picture.save(folder / f"p{i}.png")
    return src


def options(source, dst, **changes):
    base = {"only": NAMES, "severity": (1, 5), "workers": 1, "size": 32}
    return CorruptOptions(src=source, dst=dst, **(base | changes))


def run(*args, **kwargs):
    """The summary, and what was reported."""
    reports = []
    summary = corrupt_tree(options(*args, **kwargs), lambda *report: reports.append(report))
    return summary, reports


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def test_layout_content_and_summary(source, tmp_path):
    dst = tmp_path / "c"
    summary, reports = run(source, dst)
    assert (summary.images, summary.written, summary.present) == (6, 36, 0)
    assert summary.unreadable == ()
    files = sorted(p.relative_to(dst).as_posix() for p in dst.rglob("*.JPEG"))
    assert files == sorted(
        f"{name}/{s}/n0{c}/p{i}.JPEG"
        for name in NAMES
        for s in (1, 5)
        for c in (0, 1)
        for i in range(3)
    )
    assert reports == [(6 * (i + 1), 36, None) for i in range(6)]
    # The fourth image is n01/p0: what is on disk is what corrupt() gives for sample number 3.
    assert find_images(source)[3] == "n01/p0.png"
    image = Image.open(source / "n01/p0.png").resize((49, 37), Image.Resampling.BILINEAR)
    crop = np.array(image.crop((8, 2, 40, 34)))
    wanted = corrupt(torch.from_numpy(crop).permute(2, 0, 1)[None], "fog", 5, index=[3])
    found = np.asarray(Image.open(dst / "fog/5/n01/p0.JPEG"), dtype=float)
    assert found.shape == (32, 32, 3)
    assert np.abs(found - wanted[0].permute(1, 2, 0).numpy()).mean() < 4  # JPEG at quality 85


def test_defaults_are_those_of_imagenet_c(source, tmp_path):
    plain = CorruptOptions(src=source, dst=tmp_path)
    assert plain.only == CLASSICAL
    assert (plain.severity, plain.size, plain.quality) == ((1, 2, 3, 4, 5), 224, 85)


def test_resize_and_crop_are_torchvisions(source, tmp_path):
    transforms = pytest.importorskip("torchvision.transforms")
    # 256 / 206 * 309 is a little less than 384, 256 * 309 / 206 is 384.
    (source / "n00" / "odd.jpg").write_bytes(jpeg(206, 309))
    pipeline = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])
    run(source, tmp_path / "c", only=("contrast",), severity=(1,), size=224, quality=100)
    for relative in find_images(source):
        image = pipeline(Image.open(source / relative).convert("RGB"))
        batch = pil_to_tensor(image)[None]
        wanted = corrupt(batch, "contrast", 1, index=[0])[0].permute(1, 2, 0).numpy()
        found = Image.open((tmp_path / "c/contrast/1" / relative).with_suffix(".JPEG"))
        assert np.abs(np.asarray(found, dtype=float) - wanted).mean() < 1.5


def test_what_is_named_twice_is_written_once(source, tmp_path):
    summary, reports = run(source, tmp_path / "c", only=("fog", "fog"), severity=(1, 1, 2))
    assert (summary.written, summary.present) == (12, 0)
    assert reports[-1] == (12, 12, None)


def test_size_zero_keeps_the_size(source, tmp_path):
    run(source, tmp_path / "c", only=("contrast",), severity=(1,), size=0)
    with Image.open(tmp_path / "c/contrast/1/n00/p1.JPEG") as picture:
        assert picture.size == (73, 70)


def test_second_run_adds_only_what_is_missing(source, tmp_path):
    dst = tmp_path / "c"
    run(source, dst, severity=(1,))
    gone = dst / "fog/1/n00/p0.JPEG"
    stamps = {p: p.stat().st_mtime_ns for p in dst.rglob("*.JPEG")}
    data = gone.read_bytes()
    gone.unlink()
    leftover = dst / "fog/1/n00/.p0.JPEG.k3_x9ab2.tmp"
    leftover.write_bytes(b"half")
    theirs = [dst / ".download.tmp", dst / "fog/1/.notes.tmp", dst / "mine" / ".p0.JPEG.a.tmp"]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"theirs")
    summary, _ = run(source, dst)
    assert (summary.written, summary.present) == (19, 17)
    assert gone.read_bytes() == data
    assert not leftover.exists()
    assert all(p.read_bytes() == b"theirs" for p in theirs)
    assert all(p.stat().st_mtime_ns == t for p, t in stamps.items() if p != gone)


def test_workers_and_sigkill_do_not_change_the_result(source, tmp_path):
    whole, parallel, broken = tmp_path / "whole", tmp_path / "parallel", tmp_path / "broken"
    every = (1, 2, 3, 4, 5)
    run(source, whole, severity=every)
    script = tmp_path / "job.py"
    script.write_text(
        "import sys; from pathlib import Path\n"
        "from moetta.data.corrupt_tree import *\n"
        "if __name__ == '__main__':\n"
        "    for dst in sys.argv[2:]:\n"
        "        corrupt_tree(CorruptOptions(src=Path(sys.argv[1]), dst=Path(dst), size=32,\n"
        f"            only={NAMES!r}, severity={every!r}, workers=2))\n"
    )
    job = subprocess.Popen(
        [sys.executable, script, source, parallel, broken],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        limit = time.monotonic() + 250
        while len(list(broken.rglob("*.JPEG"))) < 5:
            assert job.poll() is None, "ended before it could be killed"
            assert time.monotonic() < limit
            time.sleep(0.002)
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    assert tree(parallel) == tree(whole)
    time.sleep(0.5)  # the workers notice that their parent is gone
    done = list(broken.rglob("*.JPEG"))
    plain = Preprocess((0.5,) * 3, (0.5,) * 3)
    with pytest.raises(ValueError, match=r"fog.5 is incomplete: moetta corrupt was stopped"):
        image_folder(broken / "fog" / "5", plain)
    assert len(image_folder(parallel / "fog" / "5", plain)) == 6
    for path in done:
        assert path.read_bytes() == (whole / path.relative_to(broken)).read_bytes()
    summary, _ = run(source, broken, severity=every)
    assert 5 <= summary.present == len(done)
    assert tree(broken) == tree(whole)


class TestUnreadable:
    @pytest.fixture
    def spoilt(self, source):
        (source / "n00/a.jpg").write_bytes(b"not an image")
        whole = (source / "n00/p0.png").read_bytes()
        (source / "n01/z.png").write_bytes(whole[: len(whole) // 2])
        return source

    def test_skipped_named_and_counted(self, spoilt, tmp_path):
        summary, reports = run(spoilt, tmp_path / "c")
        assert [name for name, _ in summary.unreadable] == ["n00/a.jpg", "n01/z.png"]
        assert (summary.written, summary.present) == (36, 0)
        assert reports[-1][:2] == (36, 48)  # of the files that all images would give
        problems = [problem for _, _, problem in reports if problem is not None]
        assert len(problems) == 2
        assert "n00/a.jpg" in problems[0]
        assert "n01/z.png" in problems[1]

    def test_fatal_on_request(self, spoilt, tmp_path):
        with pytest.raises(ValueError, match=r"n00.a\.jpg.*on_error"):
            run(spoilt, tmp_path / "c", on_error="fail")

    def test_it_is_an_error_if_no_image_can_be_read(self, tmp_path):
        (tmp_path / "val/n00").mkdir(parents=True)
        (tmp_path / "val/n00/a.jpg").write_bytes(b"not an image")
        with pytest.raises(ValueError, match="none of the 1 images"):
            run(tmp_path / "val", tmp_path / "c")
        assert (tmp_path / "c/fog/5/INCOMPLETE").exists()

    def test_pixels_of_unknown_range(self, source, tmp_path):
        grey = np.linspace(0, 65535, 32 * 32).reshape(32, 32)
        Image.fromarray(grey.astype(np.uint16)).save(source / "n00/deep.png")
        Image.fromarray(grey.astype(np.float32)).save(source / "n00/float.tiff")
        once = {"only": ("contrast",), "severity": (1,), "size": 0, "quality": 100}
        summary, _ = run(source, tmp_path / "c", **once)
        assert [name for name, _ in summary.unreadable] == ["n00/float.tiff"]
        with Image.open(tmp_path / "c/contrast/1/n00/deep.JPEG") as picture:
            assert 100 < np.asarray(picture).mean() < 155

    def test_an_image_that_is_too_small_is_named(self, source, tmp_path):
        Image.new("RGB", (20, 40)).save(source / "n00/tiny.png")
        summary, _ = run(source, tmp_path / "c", size=0, severity=(1,))
        assert "20 x 40" in summary.unreadable[0][1]


class TestRefusals:
    def refuse(self, source, dst, error, message, **changes):
        with pytest.raises(error, match=message):
            run(source, dst, **changes)

    def test_options(self, source, tmp_path):
        dst = tmp_path / "c"
        self.refuse(source, dst, ValueError, "did you mean 'snow'", only=("snwo",))
        self.refuse(source, dst, ValueError, "at least one", only=())
        self.refuse(source, dst, ValueError, "severity must be 1 to 5", severity=(1, 6))
        self.refuse(source, dst, ValueError, "at least 28", size=20)
        self.refuse(source, dst, ValueError, "quality", quality=0)
        self.refuse(source, dst, ValueError, "workers", workers=-1)
        self.refuse(source, dst, FileNotFoundError, r"frost1\.png", frost_folder=tmp_path)
        assert not dst.exists()

    def test_folders(self, source, tmp_path):
        self.refuse(tmp_path / "none", tmp_path / "c", FileNotFoundError, "not a folder")
        self.refuse(source, source / "c", ValueError, "outside")
        (tmp_path / "empty").mkdir()
        self.refuse(tmp_path / "empty", tmp_path / "c", ValueError, "holds no images")
        assert not (tmp_path / "c").exists()

    def test_two_images_for_one_name(self, source, tmp_path):
        Image.new("RGB", (40, 40)).save(source / "n00/p0.bmp")
        self.refuse(source, tmp_path / "c", ValueError, "would both become")

    def test_other_settings_in_a_begun_target(self, source, tmp_path):
        run(source, tmp_path / "c", severity=(1,))
        self.refuse(source, tmp_path / "c", ValueError, "seed differ", seed=1)
        (source / "n00/p9.png").write_bytes((source / "n00/p1.png").read_bytes())
        self.refuse(source, tmp_path / "c", ValueError, "images, names differ")
