import numpy as np
import pytest
import torch
from PIL import Image

from moetta.data.corruptions import ALL, CLASSICAL, EXTRA, blur, corrupt
from moetta.data.corruptions.constants import CIFAR, IMAGENET
from moetta.data.corruptions.core import Job
from moetta.data.corruptions.grid import corruption_grid
from moetta.data.corruptions.rng import Streams
from moetta.data.corruptions.textures import PHOTOGRAPHS

DETERMINISTIC = {
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
}
RANDOM = [name for name in ALL if name not in DETERMINISTIC]


def pictures(count: int, height: int, width: int) -> torch.Tensor:
    """Smooth colourful pictures with an edge, all different."""
    y, x = np.mgrid[0:height, 0:width] / 32
    out = np.empty((count, 3, height, width))
    for i in range(count):
        for c in range(3):
            out[i, c] = 127 + 90 * np.sin((1 + 0.3 * i) * x + c) * np.cos((0.7 + 0.2 * c) * y + i)
        out[i, :, :, width // 2 :] *= 0.7
    return torch.from_numpy(out).clamp(0, 255).to(torch.uint8)


def streams(count: int = 2, name: str = "test", seed: int = 0) -> Streams:
    return Streams.of(seed, torch.arange(count), name, torch.device("cpu"))


class TestNames:
    def test_the_nineteen(self):
        assert len(CLASSICAL) == 15
        assert len(EXTRA) == 4
        assert ALL == CLASSICAL + EXTRA
        assert set(IMAGENET) == set(CIFAR) == set(ALL)
        assert all(len(settings) == 5 for table in (IMAGENET, CIFAR) for settings in table.values())

    def test_unknown_name_suggests_near_ones(self):
        with pytest.raises(ValueError, match="gaussian_noise"):
            corrupt(pictures(1, 32, 32), "gausian-noise", index=[0])


class TestArguments:
    @pytest.mark.parametrize("severity", [0, 6, 2.5, True, "3"])
    def test_severity(self, severity):
        with pytest.raises(ValueError, match="severity must be 1"):
            corrupt(pictures(1, 32, 32), "fog", severity, index=[0])

    def test_float_images_name_the_conversion(self):
        with pytest.raises(ValueError, match=r"to\(torch\.uint8\)"):
            corrupt(torch.rand(1, 3, 32, 32), "fog", index=[0])

    @pytest.mark.parametrize("shape", [(3, 32, 32), (1, 1, 32, 32), (1, 32, 32, 3)])
    def test_shape(self, shape):
        with pytest.raises(ValueError, match=r"\[B, 3, H, W\]"):
            corrupt(torch.zeros(shape, dtype=torch.uint8), "fog", index=[0])

    def test_too_small(self):
        with pytest.raises(ValueError, match="at least 28"):
            corrupt(torch.zeros(1, 3, 27, 64, dtype=torch.uint8), "fog", index=[0])

    @pytest.mark.parametrize(
        ("index", "message"),
        [([0], "each of the 2 images"), ([0.0, 1.0], "integers"), ([0, -1], "negative")],
    )
    def test_index(self, index, message):
        with pytest.raises(ValueError, match=message):
            corrupt(pictures(2, 32, 32), "fog", index=index)

    def test_constants(self):
        with pytest.raises(ValueError, match="'auto', 'imagenet' or 'cifar'"):
            corrupt(pictures(1, 32, 32), "fog", index=[0], constants="tiny")

    def test_empty_batch(self):
        out = corrupt(torch.zeros(0, 3, 32, 32, dtype=torch.uint8), "fog", index=[])
        assert out.shape == (0, 3, 32, 32)

    def test_input_is_left_alone(self):
        images = pictures(2, 40, 48)
        before = images.clone()
        for name in ALL:
            corrupt(images, name, index=[0, 1])
        assert torch.equal(images, before)


@pytest.mark.parametrize("name", ALL)
class TestEvery:
    @pytest.mark.parametrize("size", [(28, 28), (28, 45), (33, 64), (90, 70)])
    @pytest.mark.parametrize("constants", ["imagenet", "cifar"])
    def test_any_size_and_severity(self, name, size, constants):
        images = pictures(2, *size)
        for severity in (1, 2, 3, 4, 5):
            out = corrupt(images, name, severity, index=[3, 4], constants=constants)
            assert out.shape == images.shape
            assert out.dtype == torch.uint8
        assert not torch.equal(out, images)

    @pytest.mark.parametrize("size", [(32, 32), (72, 100)])
    def test_batch_order_and_threads_do_not_matter(self, name, size):
        images, index = pictures(7, *size), torch.tensor([5, 0, 9, 2, 70000, 2**40, 1])
        whole = corrupt(images, name, 4, index=index, seed=3)
        order = torch.tensor([6, 2, 0, 5, 1, 4, 3])
        shuffled = corrupt(images[order], name, 4, index=index[order], seed=3)
        assert torch.equal(shuffled, whole[order])
        threads = torch.get_num_threads()
        torch.set_num_threads(2 if threads == 1 else 1)
        try:
            singles = [
                corrupt(images[i, None], name, 4, index=[index[i]], seed=3) for i in range(7)
            ]
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(torch.cat(singles), whole)

    def test_layout_of_memory_does_not_matter(self, name):
        images = pictures(2, 40, 48)
        strided = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        a, b = (corrupt(x, name, 3, index=[0, 1]) for x in (images, strided))
        assert torch.equal(a, b)

    def test_random_exactly_where_it_should_be(self, name):
        image = pictures(1, 48, 48).expand(2, -1, -1, -1)
        two = corrupt(image, name, 5, index=[0, 1], constants="imagenet")
        other = corrupt(image, name, 5, index=[0, 1], seed=1, constants="imagenet")
        assert torch.equal(two[0], two[1]) == (name in DETERMINISTIC)
        assert torch.equal(two, other) == (name in DETERMINISTIC)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_gpu_agrees(self, name):
        images = pictures(3, 96, 80)
        host = corrupt(images, name, 4, index=range(3))
        device = corrupt(images.cuda(), name, 4, index=range(3))
        assert device.is_cuda
        assert (host.float() - device.cpu().float()).abs().mean() < 0.05


@pytest.mark.parametrize("name", sorted(set(ALL) - {"saturate", "elastic_transform", "spatter"}))
def test_severity_moves_away_from_the_image(name):
    # Left out: their settings differ in kind (grey or vivid; warp or ripple; water or mud).
    images = pictures(4, 96, 91)
    error = [
        (corrupt(images, name, s, index=range(4)).float() - images.float()).square().mean()
        for s in (1, 5)
    ]
    assert error[1] > error[0] > 0


def test_auto_takes_cifar_constants_up_to_64_pixels():
    for side, preset in ((64, "cifar"), (65, "imagenet")):
        images = pictures(1, side, 80)
        auto = corrupt(images, "contrast", 5, index=[0])
        assert torch.equal(auto, corrupt(images, "contrast", 5, index=[0], constants=preset))


def test_cifar_constants_by_their_formulas():
    images = pictures(1, 32, 32)
    levels = images.double()
    mean = levels.mean((2, 3), keepdim=True)
    contrast = (levels - mean) * 0.15 + mean
    top = levels.amax(1, keepdim=True)
    brightness = levels * (top + 0.3 * 255).clamp(max=255) / top
    for name, wanted in (("contrast", contrast), ("brightness", brightness)):
        out = corrupt(images, name, 5, index=[0])
        assert (out.double() - wanted.clamp(0, 255).floor()).abs().max() <= 1
        assert (out.double() - wanted.clamp(0, 255).floor()).abs().mean() < 0.02


@pytest.mark.parametrize("size", [(28, 45), (200, 240), (224, 224)])
def test_pixelate_is_pillows_box_both_ways(size):
    images = pictures(1, *size)
    for severity, scale in enumerate((0.6, 0.5, 0.4, 0.3, 0.25), start=1):
        picture = Image.fromarray(images[0].permute(1, 2, 0).numpy().copy())
        small = (int(size[1] * scale), int(size[0] * scale))
        wanted = picture.resize(small, Image.Resampling.BOX).resize(
            size[::-1], Image.Resampling.BOX
        )
        out = corrupt(images, "pixelate", severity, index=[0], constants="imagenet")
        difference = out[0].permute(1, 2, 0).numpy().astype(int) - np.asarray(wanted)
        assert np.abs(difference).mean() < 0.05


@pytest.mark.parametrize("reach", [1, 4])
def test_glass_chains_equal_the_walk_pixel_by_pixel(reach):
    height, width = 30, 37
    job = Job(None, streams(2), "imagenet")
    fast = blur._glass_sources(job, 0, reach, torch.Size((2, 3, height, width)))
    bits = job.streams.bits(height * width).view(2, height, width).numpy().astype(np.int64)
    for sample in range(2):
        colour = np.arange(height * width).reshape(height, width) + sample * height * width
        for y in range(height - reach, reach, -1):
            for x in range(width - reach, reach, -1):
                word = int(bits[sample, y, x])
                dy = ((word >> 16 & 0xFFFF) * 2 * reach >> 16) - reach
                dx = ((word & 0xFFFF) * 2 * reach >> 16) - reach
                colour[y, x] = colour[y + dy, x + dx]
        assert np.array_equal(fast.view(2, height, width)[sample].numpy(), colour)


class TestFrostFolder:
    def make(self, folder, names=PHOTOGRAPHS, size=(120, 150)):
        """Photographs whose red and green say where a pixel was, and whose blue says which."""
        y, x = np.mgrid[0 : size[0], 0 : size[1]]
        for i, name in enumerate(names):
            array = np.stack([y, x, np.full_like(y, 20 * (i + 1))], -1).astype(np.uint8)
            # The name says JPEG, the bytes may be PNG: exact levels, and Pillow reads the bytes.
            Image.fromarray(array).save(folder / name, format="PNG")

    def test_missing_photographs_are_listed(self, tmp_path):
        self.make(tmp_path, PHOTOGRAPHS[:4])
        with pytest.raises(FileNotFoundError, match=r"lacks frost5\.jpg, frost6\.jpg"):
            corrupt(pictures(1, 32, 32), "frost", index=[0], frost_folder=tmp_path)

    @pytest.mark.parametrize(("constants", "step"), [("imagenet", 1), ("cifar", 5)])
    def test_a_crop_of_one_of_the_first_five_is_added(self, tmp_path, constants, step):
        self.make(tmp_path, size=(40 * step, 44 * step) if step == 5 else (120, 150))
        black = torch.zeros(64, 3, 32, 30, dtype=torch.uint8)
        weight = {"imagenet": 0.75, "cifar": 0.45}[constants]
        out = corrupt(
            black, "frost", 5, index=range(64), constants=constants, frost_folder=tmp_path
        )
        levels = out.double() / weight
        which = (levels[:, 2].mean((1, 2)) / 20).round()
        assert set(which.tolist()) == {1, 2, 3, 4, 5}
        down = (levels[:, 0, -1] - levels[:, 0, 0]).mean(1) / 31
        right = (levels[:, 1, :, -1] - levels[:, 1, :, 0]).mean(1) / 29
        assert torch.allclose(down, torch.full_like(down, step), atol=0.1)
        assert torch.allclose(right, torch.full_like(right, step), atol=0.1)
        tops = levels[:, 0, 0].mean(1)
        assert tops.max() - tops.min() > 0.7 * (87 if step == 1 else 40)

    def test_small_photographs_are_enlarged(self, tmp_path):
        self.make(tmp_path, size=(60, 50))
        out = corrupt(pictures(1, 100, 90), "frost", index=[0], frost_folder=tmp_path)
        assert out.shape == (1, 3, 100, 90)


class TestStreams:
    def test_uniform_is_uniform(self):
        u = streams(4).uniform(200_000)
        assert 0 < u.min() < 1e-4
        assert 1 - 1e-4 < u.max() < 1
        counts = torch.histc(u, 100, 0, 1)
        chi2 = ((counts - 8000) ** 2 / 8000).sum()
        assert 50 < chi2 < 160  # 99 degrees of freedom

    def test_normal_is_normal(self):
        z = streams(4).normal(200_001).double()
        n = z.numel()
        assert abs(z.mean()) < 4 / n**0.5
        assert abs(z.var() - 1) < 4 * (2 / n) ** 0.5
        assert abs((z**4).mean() - 3) < 4 * (96 / n) ** 0.5
        assert abs((z > 3).double().mean() - 0.00135) < 4 * (0.00135 / n) ** 0.5

    @pytest.mark.parametrize("other", ["sample", "seed", "name", "draw"])
    def test_streams_are_unrelated_at_every_shift(self, other):
        n = 1 << 16
        a = streams(1).normal(n)[0]
        b = {
            "sample": lambda: streams(2).normal(n)[1],
            "seed": lambda: streams(1, seed=1).normal(n)[0],
            "name": lambda: streams(1, name="tset").normal(n)[0],
            "draw": lambda: streams(1).normal(n, draw=1)[0],
        }[other]()
        shifted = torch.fft.irfft(torch.fft.rfft(a) * torch.fft.rfft(b).conj(), n=n) / n**0.5
        assert shifted.abs().max() < 6

    def test_neighbouring_numbers_are_unrelated(self):
        z = streams(1).normal(1 << 18)[0]
        for lag in (1, 2, 3, 224, 1 << 16, 1 << 17):
            assert abs((z[:-lag] * z[lag:]).mean()) < 4 / (len(z) - lag) ** 0.5

    def test_integers_cover_their_range(self):
        numbers = streams(1).integers(10_000, 7)[0]
        assert torch.bincount(numbers, minlength=7).min() > 1250
        assert numbers.max() == 6

    def test_a_uniform_draw_of_exactly_one_stays_in_the_integer_range(self):
        """The highest of the 2^24 draws; found by search, once in many thousand pictures."""
        picture = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
        frozen = corrupt(picture, "frost", 5, index=torch.tensor([26835]), seed=394)
        assert frozen.shape == picture.shape


def test_grid_shows_every_corruption_and_severity(tmp_path):
    image = pictures(1, 72, 96)[0].permute(1, 2, 0).numpy()
    path = tmp_path / "new" / "grid.png"
    corruption_grid(image, path, side=32)
    with Image.open(path) as grid:
        assert grid.width > 2 * 5 * 32
        assert grid.height > 10 * 24
