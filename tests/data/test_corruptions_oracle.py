"""Against `imagecorruptions-imaug`, a fork of the authors' code for ImageNet-C.

The fork departs from ImageNet-C in four places; there ours follows ImageNet-C:

- elastic transform: the fork has no affine map, and other constants. Compared with the published
  recipe, rebuilt here from OpenCV, scikit-image and SciPy.
- frost: the fork also draws the sixth photograph and enlarges all by 1.1. The sixth is kept out
  of its draw here; the enlargement does not show in the statistics.
- pixelate: the fork enlarges with NEAREST, which differs from BOX where a pixel's centre falls on
  a border (200 x 240 at severity 3). Such sizes are compared with Pillow in test_corruptions.py.
- snow: the fork keeps the flakes in floating point where ImageNet-C stores bytes: half a level.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from moetta.data.corruptions import corrupt, filters

oracle = pytest.importorskip("imagecorruptions", reason="needs imagecorruptions-imaug")
cv2 = pytest.importorskip("cv2")
datasets = pytest.importorskip("sklearn.datasets")
scipy_ndimage = pytest.importorskip("scipy.ndimage")
skimage_filters = pytest.importorskip("skimage.filters")

FROST = Path(oracle.__file__).parent / "frost"
DRAWS = 40

EXACT = (
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
)
RANDOM = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "speckle_noise",
    "glass_blur",
    "motion_blur",
    "snow",
    "frost",
    "fog",
    "spatter",
)
# These vary as a whole picture, or in few large drops: 40 draws say less of their variance.
WHOLE_PICTURE = {"frost": 0.45, "fog": 0.45, "motion_blur": 0.45, "spatter": 0.45, "snow": 0.2}


def photographs():
    china, flower = datasets.load_sample_images().images
    return china, flower


def ours(array, name, severity, count=1, **options):
    batch = torch.from_numpy(array).permute(2, 0, 1).expand(count, -1, -1, -1)
    out = corrupt(batch, name, severity, index=range(count), constants="imagenet", **options)
    return out.permute(0, 2, 3, 1).numpy()


@pytest.fixture(scope="module")
def images():
    china, flower = photographs()
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:162, 0:162]
    synthetic = np.stack([x * 1.5, y * 1.5, 255 * ((x // 16 + y // 16) % 2)], -1)
    return {
        "china": np.ascontiguousarray(china[100:324, 100:324]),
        "flower": np.ascontiguousarray(flower[50:272, 200:486]),
        "synthetic": synthetic.astype(np.uint8),
        "noise": rng.integers(0, 256, (96, 128, 3), dtype=np.uint8),
    }


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", EXACT)
def test_deterministic_ones_agree(images, name, severity):
    for label, array in images.items():
        wanted = oracle.corrupt(array, severity, name).astype(float)
        difference = np.abs(ours(array, name, severity)[0] - wanted)
        # A level is 1/255. What is left is truncation of values that are whole numbers but for
        # their last bit, which falls either way.
        assert difference.mean() < 0.3, label


@pytest.mark.parametrize("angle", [-135.0, -100.0, -45.0, -10.3, 0.0, 44.9])
def test_motion_agrees_for_a_given_direction(images, angle):
    array = images["flower"]
    batch = torch.from_numpy(array).permute(2, 0, 1)[None].float()
    out = filters.motion(batch, 20, 15, [angle])[0].permute(1, 2, 0).numpy()
    wanted = oracle.corruptions._motion_blur(array, 20, 15, angle)
    assert np.abs(out - wanted).max() < 0.01


def statistics(draws, clean):
    """Per draw: mean, variance, PSNR against the clean image, and difference of neighbours."""
    draws = draws.astype(float)
    error = ((draws - clean) ** 2).mean((1, 2, 3))
    return {
        "mean": draws.mean((1, 2, 3)),
        "variance": draws.var((1, 2, 3)),
        "psnr": 10 * np.log10(255**2 / error),
        "roughness": np.abs(np.diff(draws, axis=2)).mean((1, 2, 3)),
    }


def assert_alike(mine, theirs, clean):
    a, b = statistics(mine, clean), statistics(theirs, clean)
    slack = {
        "mean": 0.5,
        "variance": 0.01 * b["variance"].mean(),
        "psnr": 0.1,
        "roughness": 0.02 * b["roughness"].mean(),
    }
    for key in slack:
        noise = np.sqrt(a[key].var(ddof=1) / len(mine) + b[key].var(ddof=1) / len(theirs))
        gap = a[key].mean() - b[key].mean()
        assert abs(gap) < slack[key] + 4.5 * noise, (key, gap, noise)
    # How much a pixel varies from draw to draw.
    ratio = mine.astype(float).var(0).mean() / theirs.astype(float).var(0).mean()
    return ratio


@pytest.fixture(scope="module")
def crops():
    china, flower = photographs()
    return [
        np.ascontiguousarray(china[120:216, 200:296]),
        np.ascontiguousarray(flower[140:236, 250:346]),
    ]


@pytest.mark.parametrize("severity", [1, 3, 5])
@pytest.mark.parametrize("name", RANDOM)
def test_random_ones_agree_in_distribution(crops, name, severity, monkeypatch):
    np.random.seed(severity)  # noqa: NPY002 - what the oracle draws from
    randint = np.random.randint
    if name == "frost":
        monkeypatch.setattr(
            np.random, "randint", lambda *a: randint(5) if a == (6,) else randint(*a)
        )
    seeded = name in ("glass_blur", "impulse_noise")
    for clean in crops:
        theirs = np.stack(
            [
                oracle.corrupt(clean, severity, name, **({"seed": i} if seeded else {}))
                for i in range(DRAWS)
            ]
        )
        folder = FROST if name == "frost" else None
        mine = ours(clean, name, severity, DRAWS, frost_folder=folder)
        ratio = assert_alike(mine, theirs, clean)
        assert abs(ratio - 1) < WHOLE_PICTURE.get(name, 0.1)


def elastic_as_published(array, severity, rng):
    """ImageNet-C's recipe: a random affine map, then a smooth random displacement."""
    unit = 244 / 224 * min(array.shape[:2])
    reach, sigma, corner = (
        unit * c
        for c in (
            (2, 0.7, 0.1),
            (2, 0.08, 0.2),
            (0.05, 0.01, 0.02),
            (0.07, 0.01, 0.02),
            (0.12, 0.01, 0.02),
        )[severity - 1]
    )
    image = array.astype(np.float32) / 255
    height, width = image.shape[:2]
    middle, half = np.float32([width // 2, height // 2]), min(height, width) // 3
    before = middle + half * np.float32([[1, 1], [1, -1], [-1, -1]])
    after = before + rng.uniform(-corner, corner, before.shape).astype(np.float32)
    affine = cv2.getAffineTransform(before, after)
    image = cv2.warpAffine(image, affine, (width, height), borderMode=cv2.BORDER_REFLECT_101)
    down, right = (
        skimage_filters.gaussian(
            rng.uniform(-1, 1, (height, width)), sigma, mode="reflect", truncate=3
        )
        * reach
        for _ in range(2)
    )
    y, x = np.mgrid[0:height, 0:width]
    planes = [
        scipy_ndimage.map_coordinates(image[..., c], [y + down, x + right], order=1, mode="reflect")
        for c in range(3)
    ]
    return np.uint8(np.clip(np.stack(planes, -1), 0, 1) * 255)


@pytest.mark.parametrize("severity", [1, 2, 5])
def test_elastic_transform_agrees_with_the_published_recipe(crops, severity):
    rng = np.random.default_rng(0)
    for clean in crops:
        theirs = np.stack([elastic_as_published(clean, severity, rng) for _ in range(DRAWS)])
        mine = ours(clean, "elastic_transform", severity, DRAWS)
        ratio = assert_alike(mine, theirs, clean)
        assert abs(ratio - 1) < 0.12


def test_procedural_ice_resembles_the_photographs(crops):
    for clean in crops:
        ice = ours(clean, "frost", 5, DRAWS).astype(float)
        photographs_ = ours(clean, "frost", 5, DRAWS, frost_folder=FROST).astype(float)
        assert abs(ice.mean() - photographs_.mean()) < 10
        assert 0.75 < ice.std() / photographs_.std() < 1.33
