"""The five settings of each corruption, one per severity, for large and for 32-pixel images.

The numbers are those of ImageNet-C and CIFAR-10-C (Hendrycks and Dietterich, 2019). Elastic
transform's are fractions of the image's shorter side, as in CIFAR-10-C; ImageNet-C's 244, written
for 224, is kept.
"""

from typing import Any, Literal

Settings = tuple[Any, ...]  # five, one per severity

CLASSICAL: tuple[str, ...] = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
EXTRA: tuple[str, ...] = ("speckle_noise", "spatter", "gaussian_blur", "saturate")
ALL: tuple[str, ...] = CLASSICAL + EXTRA

_UNIT = 244 / 224

IMAGENET: dict[str, Settings] = {
    "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),  # standard deviation
    "shot_noise": (60, 25, 12, 5, 3),  # photons at full white
    "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),  # share of values replaced
    "speckle_noise": (0.15, 0.2, 0.35, 0.45, 0.6),  # standard deviation relative to the value
    "gaussian_blur": (1, 2, 3, 4, 6),  # sigma
    "glass_blur": (
        (0.7, 1, 2),
        (0.9, 2, 1),
        (1, 2, 3),
        (1.1, 3, 2),
        (1.5, 4, 2),
    ),  # sigma, reach, rounds
    "defocus_blur": (
        (3, 0.1),
        (4, 0.5),
        (6, 0.5),
        (8, 0.5),
        (10, 0.5),
    ),  # radius, sigma of the soft edge
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),  # radius, sigma
    "zoom_blur": (
        (1.11, 0.01),
        (1.16, 0.01),
        (1.21, 0.02),
        (1.26, 0.02),
        (1.31, 0.03),
    ),  # stop, step
    # mean, deviation, zoom, threshold, blur radius, blur sigma, share of the image kept
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": (
        (1, 0.4),
        (0.8, 0.6),
        (0.7, 0.7),
        (0.65, 0.7),
        (0.6, 0.75),
    ),  # weights of image and ice
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),  # density, decay of the detail
    # mean, deviation, sigma, threshold, strength or second sigma, 0 water / 1 mud
    "spatter": (
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    ),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),  # factor on the distance from the mean
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),  # added to HSV's value
    "saturate": (
        (0.3, 0),
        (0.1, 0),
        (2, 0),
        (5, 0.1),
        (20, 0.2),
    ),  # factor and offset on HSV's saturation
    "jpeg_compression": (25, 18, 15, 10, 7),  # quality
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),  # scale
    # displacement, its sigma, shift of the affine map's corners: in shorter sides
    "elastic_transform": tuple(
        (_UNIT * a, _UNIT * s, _UNIT * t)
        for a, s, t in (
            (2, 0.7, 0.1),
            (2, 0.08, 0.2),
            (0.05, 0.01, 0.02),
            (0.07, 0.01, 0.02),
            (0.12, 0.01, 0.02),
        )
    ),
}

CIFAR: dict[str, Settings] = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
    "jpeg_compression": (80, 65, 58, 50, 40),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    "elastic_transform": (
        (0, 0, 0.08),
        (0.05, 0.2, 0.07),
        (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03),
    ),
}

Preset = Literal["imagenet", "cifar"]
PRESETS: dict[Preset, dict[str, Settings]] = {"imagenet": IMAGENET, "cifar": CIFAR}
