"""Linear filters shared by the corruptions: by matrices, by FFT, and by steps along a line."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Border = Literal["replicate", "symmetric"]


def along_rows(images: Tensor, columns: Tensor) -> Tensor:
    """Apply `columns` [W', W] to each row of [..., H, W].

    There is one matrix product per image, so that rounding cannot depend on the rest of the batch.
    """
    flat = images.reshape(-1, *images.shape[-2:])
    out = torch.bmm(flat, columns.T.expand(len(flat), -1, -1))
    return out.view(*images.shape[:-1], -1)


def down_columns(images: Tensor, rows: Tensor) -> Tensor:
    """Apply `rows` [H', H] to each column of [..., H, W], by one matrix product per image."""
    flat = images.reshape(-1, *images.shape[-2:])
    out = torch.bmm(rows.expand(len(flat), -1, -1), flat)
    return out.view(*images.shape[:-2], *out.shape[-2:])


def _source(position: Tensor, n: int, border: Border) -> Tensor:
    if border == "replicate":
        return position.clamp(0, n - 1)
    folded = position.remainder(2 * n)
    return torch.where(folded < n, folded, 2 * n - 1 - folded)


@lru_cache(maxsize=128)
def gaussian_matrix(
    n: int, sigma: float, truncate: float, border: Border, device: torch.device
) -> Tensor:
    """The [n, n] matrix of a Gaussian blur, cut off at `truncate` sigmas, with its border rule."""
    radius = int(truncate * sigma + 0.5)
    offset = torch.arange(-radius, radius + 1)
    weight = (
        torch.exp(-0.5 * (offset / sigma).to(torch.float64) ** 2)
        if radius
        else torch.ones(1).double()
    )
    weight /= weight.sum()
    matrix = torch.zeros(n, n, dtype=torch.float64)
    column = _source(torch.arange(n)[:, None] + offset, n, border)
    matrix.scatter_add_(1, column, weight.expand(n, -1))
    return matrix.to(device, torch.float32)


def gaussian(
    images: Tensor, sigma: float, truncate: float = 4.0, border: Border = "replicate"
) -> Tensor:
    """Gaussian blur of float images [..., H, W]."""
    height, width = images.shape[-2:]
    columns = gaussian_matrix(width, float(sigma), truncate, border, images.device)
    rows = gaussian_matrix(height, float(sigma), truncate, border, images.device)
    return down_columns(along_rows(images, columns), rows)


def gaussian_taps(size: int, sigma: float) -> Tensor:
    """`size` Gaussian weights that sum to one (float64)."""
    offset = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    weight = torch.exp(-(offset**2) / (2 * sigma**2))
    return weight / weight.sum()


@lru_cache(maxsize=64)
def disk_kernel(radius: float, softness: float) -> Tensor:
    """A disk with a slightly soft edge, on a square of odd side with no empty margin (float64)."""
    reach, size = (8, 3) if radius <= 8 else (int(radius), 5)
    offset = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disk = (offset[:, None] ** 2 + offset**2 <= radius**2).double()
    disk /= disk.sum()
    taps = gaussian_taps(size, softness)
    padded = F.pad(disk[None, None], (size // 2,) * 4, mode="reflect")
    kernel = F.conv2d(padded, (taps[:, None] * taps)[None, None])[0, 0]
    used = int(torch.nonzero(kernel.amax(0) > 1e-12).min())
    return kernel[used : kernel.shape[0] - used, used : kernel.shape[1] - used].contiguous()


@lru_cache(maxsize=16)
def _disk_spectrum(
    radius: float, softness: float, size: tuple[int, int], device: torch.device
) -> Tensor:
    # The kernel is symmetric, so correlation and convolution are the same.
    spectrum: Tensor = torch.fft.rfft2(disk_kernel(radius, softness), s=size)
    return spectrum.to(device, torch.complex64)


def _fft_length(n: int) -> int:
    """The smallest length >= n with no prime factor above 5."""
    while True:
        rest = n
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return n
        n += 1


def disk_blur(images: Tensor, radius: float, softness: float) -> Tensor:
    """Blur float images [B, C, H, W] with `disk_kernel`, mirrored at the edge pixels."""
    height, width = images.shape[-2:]
    reach = disk_kernel(radius, softness).shape[0] // 2
    size = (_fft_length(height + 2 * reach), _fft_length(width + 2 * reach))
    spectrum = _disk_spectrum(radius, softness, size, images.device)
    padded = F.pad(images, (reach,) * 4, mode="reflect")
    blurred: Tensor = torch.fft.irfft2(torch.fft.rfft2(padded, s=size).mul_(spectrum), s=size)
    return blurred[..., 2 * reach : 2 * reach + height, 2 * reach : 2 * reach + width]


def motion(images: Tensor, radius: int, sigma: float, degrees: Sequence[float]) -> Tensor:
    """Smear float images [B, C, H, W] along one direction each.

    This is the half Gaussian of ImageMagick's motion blur. Each step shifts by whole pixels and
    repeats the edge, so an image costs one multiply-add per step.
    """
    height, width = images.shape[-2:]
    taps = torch.exp(-(torch.arange(2 * radius + 1, dtype=torch.float64) ** 2) / (2 * sigma**2))
    weights = (taps / taps.sum()).tolist()
    padded = F.pad(images, (2 * radius,) * 4, mode="replicate")
    out = torch.zeros_like(images)
    for target, source, angle in zip(out, padded, degrees, strict=True):
        step_y, step_x = math.sin(math.radians(angle)), math.cos(math.radians(angle))
        for i, weight in enumerate(weights):
            top = 2 * radius + math.ceil(i * step_y - 0.5)
            left = 2 * radius + math.ceil(i * step_x - 0.5)
            target.add_(source[:, top : top + height, left : left + width], alpha=weight)
    return out


def crop_and_zoom(images: Tensor, factor: float) -> Tensor:
    """Enlarge the middle of float images [B, C, H, W] by `factor` (>= 1), keeping their size."""
    if factor == 1:
        return images
    height, width = images.shape[-2:]
    inner = (math.ceil(height / factor), math.ceil(width / factor))
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    return zoom(images[..., top : top + inner[0], left : left + inner[1]], factor, (height, width))


def zoom(inner: Tensor, factor: float, size: tuple[int, int]) -> Tensor:
    """Enlarge [B, C, h, w] linearly, corners aligned, then crop the middle to `size`."""
    full = (round(inner.shape[-2] * factor), round(inner.shape[-1] * factor))
    large = F.interpolate(inner, size=full, mode="bilinear", align_corners=True)
    top, left = (full[0] - size[0]) // 2, (full[1] - size[1]) // 2
    return large[..., top : top + size[0], left : left + size[1]]
