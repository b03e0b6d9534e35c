"""Brightness, contrast, saturation, elastic transform, pixelation and JPEG."""

import math
from functools import lru_cache
from io import BytesIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from moetta.data.corruptions import filters
from moetta.data.corruptions.core import Job, to_bytes


def brightness(images: Tensor, job: Job) -> Tensor:
    """Raise the value in HSV: all channels scale with the largest; hue and saturation stay."""
    value = torch.arange(256, dtype=torch.float64, device="cpu")
    raised = (value + 255 * job.setting).clamp(max=255)
    gain = (raised / value.clamp(min=1)).float().to(images.device)
    top = images.amax(1, keepdim=True)
    levels = images * gain[top.int()]
    # Black has no hue, so it turns grey.
    return to_bytes(levels.masked_fill_(top == 0, float(raised[0])))


def saturate(images: Tensor, job: Job) -> Tensor:
    """Scale the saturation in HSV: each channel's distance from the largest."""
    factor, offset = job.setting
    levels = images.float()
    top = levels.amax(1, keepdim=True)
    depth = top - levels
    spread = depth.amax(1, keepdim=True)
    saturation = spread / top.clamp(min=1)
    wanted = (saturation * factor + offset).clamp_(0, 1)
    # Grey counts as hue 0, red, so the other two channels drop.
    red = torch.tensor([0.0, 1.0, 1.0], device=images.device).view(1, 3, 1, 1)
    share = torch.where(spread > 0, depth / spread.clamp(min=1), red)
    return to_bytes(top - top * wanted * share)


def contrast(images: Tensor, job: Job) -> Tensor:
    """Move each value towards its channel's mean."""
    # A sum of integers does not depend on their order.
    pixels = images.shape[-1] * images.shape[-2]
    mean = images.sum((2, 3), keepdim=True, dtype=torch.int64).cpu().double() / pixels
    offset = (mean * (1 - job.setting)).float().to(images.device)
    return to_bytes(images * job.setting + offset)


def pixelate(images: Tensor, job: Job) -> Tensor:
    """Shrink by averaging, then enlarge by repeating."""
    batch, channels, height, width = images.shape
    small = (int(height * job.setting), int(width * job.setting))
    down, down_share = _boxes(height, small[0], images.device)
    along, along_share = _boxes(width, small[1], images.device)
    # Sums of whole numbers are exact in any order. Like Pillow, round after each pass.
    wide = torch.mm(images.float().view(-1, len(along)), along).mul_(along_share)
    tall = wide.add_(0.5).floor_().view(-1, len(down), small[1])
    blocks = torch.matmul(down.T, tall).mul_(down_share[:, None]).add_(0.5).to(torch.uint8)
    blocks = blocks.view(batch, channels, *small)
    blocks = blocks.index_select(-1, _nearest(small[1], width, images.device))
    return blocks.index_select(-2, _nearest(small[0], height, images.device))


@lru_cache(maxsize=64)
def _boxes(n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A matrix that sums n values into m groups, and 1 / the size of each group.

    The matrix [n, m] has a one where the centre of an input lies within an output (Pillow's BOX).
    It repeats gcd(n, m) times along its diagonal, so one block of it, not too small, is enough.
    """
    common = math.gcd(n, m)
    parts = max(d for d in range(1, common + 1) if common % d == 0 and (d == 1 or n // d >= 32))
    n, m = n // parts, m // parts
    centre = (torch.arange(m, dtype=torch.float64) + 0.5) * (n / m)
    distance = (torch.arange(n, dtype=torch.float64)[:, None] + 0.5 - centre) / (n / m)
    inside = ((distance > -0.5) & (distance <= 0.5)).to(device, torch.float32)
    return inside, 1 / inside.sum(0)


@lru_cache(maxsize=64)
def _nearest(n: int, m: int, device: torch.device) -> Tensor:
    """int64 [m]: the input at the centre of each of m >= n outputs."""
    return ((torch.arange(m, device=device) * 2 + 1) * n).div(2 * m, rounding_mode="floor")


def jpeg_compression(images: Tensor, job: Job) -> Tensor:
    """Encode as JPEG and decode again (by Pillow, on the CPU)."""
    height, width = images.shape[-2:]
    planes = images.cpu().numpy()
    out = np.empty_like(planes)
    for source, target in zip(planes, out, strict=True):
        # Pillow merges and splits channels faster than transposing and copying would.
        bands = [Image.frombuffer("L", (width, height), b, "raw", "L", 0, 1) for b in source]
        buffer = BytesIO()
        Image.merge("RGB", bands).save(buffer, "JPEG", quality=job.setting)
        decoded = Image.open(buffer, formats=["JPEG"])
        for plane, band in zip(target, "RGB", strict=True):
            plane[:] = np.frombuffer(decoded.tobytes("raw", band), np.uint8).reshape(height, width)
    return torch.from_numpy(out).to(images.device)


def elastic_transform(images: Tensor, job: Job) -> Tensor:
    """Apply a random affine map, then a smooth random displacement of each pixel."""
    height, width = images.shape[-2:]
    short = min(height, width)
    reach, sigma, corner = (short * c for c in job.setting)
    shift = job.streams.uniform(6, draw=0, low=-corner, high=corner).view(-1, 3, 2)
    y = torch.arange(height, dtype=torch.float32, device=images.device).view(-1, 1)
    x = torch.arange(width, dtype=torch.float32, device=images.device)
    levels = _sample(images.float(), *_affine(shift, y, x), edge=False)
    if reach:
        field = job.streams.uniform(2 * height * width, draw=1, low=-1, high=1)
        field = filters.gaussian(field.view(-1, 2, height, width), sigma, 3.0, "symmetric")
        down, right = field.mul_(reach).unbind(1)
        levels = _sample(levels, down.add_(y), right.add_(x), edge=True)
    return to_bytes(levels)


def _affine(shift: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The y and x each pixel comes from when three corners move by `shift` [B, 3, (x, y)].

    The corners are those of a centred square with two thirds of the image's shorter side.
    """
    height, width = y.numel(), x.numel()
    half = min(height, width) // 3
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], device=shift.device)
    before = half * corners + torch.tensor([width // 2, height // 2], device=shift.device)
    after = before + shift
    # Written out, not solved, so that it is the same in every batch: sides @ inverse(moved).
    (p, q), (r, s) = before.diff(dim=0).T.tolist()
    (a, c), (b, d) = after.diff(dim=1).permute(1, 2, 0)[..., None, None]
    area = a * d - b * c
    start_y = y - after[:, 0, 1, None, None]
    start_x = x - after[:, 0, 0, None, None]
    source_x = start_x * ((p * d - q * c) / area) + start_y * ((q * a - p * b) / area)
    source_y = start_x * ((r * d - s * c) / area) + start_y * ((s * a - r * b) / area)
    return source_y.add_(before[0, 1]), source_x.add_(before[0, 0])


def _sample(levels: Tensor, y: Tensor, x: Tensor, edge: bool) -> Tensor:
    """Read float images at fractional (y, x); mirror at the border, with `edge` edge included."""
    height, width = levels.shape[-2:]
    grid = torch.empty(*y.shape, 2, device=levels.device)
    for part, where, size in ((grid[..., 0], x, width), (grid[..., 1], y, height)):
        scale, offset = (2 / size, 1 / size - 1) if edge else (2 / (size - 1), -1)
        torch.mul(where, scale, out=part).add_(offset)
    return F.grid_sample(
        levels, grid, mode="bilinear", padding_mode="reflection", align_corners=not edge
    )
