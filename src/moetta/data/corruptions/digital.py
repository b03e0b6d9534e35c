"""Brightness, contrast, saturation, elastic transform, pixelation and JPEG."""

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
    """Raise HSV's value: every channel grows with the largest one, hue and saturation stay."""
    value = torch.arange(256, dtype=torch.float64, device="cpu")
    raised = (value + 255 * job.setting).clamp(max=255)
    gain = (raised / value.clamp(min=1)).float().to(images.device)
    top = images.amax(1, keepdim=True)
    levels = images * gain[top.int()]
    # Black has no hue: it turns grey.
    return to_bytes(levels.masked_fill_(top == 0, float(raised[0])))


def saturate(images: Tensor, job: Job) -> Tensor:
    """Scale HSV's saturation: every channel's distance from the largest one."""
    factor, offset = job.setting
    levels = images.float()
    top = levels.amax(1, keepdim=True)
    depth = top - levels
    spread = depth.amax(1, keepdim=True)
    saturation = spread / top.clamp(min=1)
    wanted = (saturation * factor + offset).clamp_(0, 1)
    # A grey pixel counts as hue 0, red: the other two channels sink.
    red = torch.tensor([0.0, 1.0, 1.0], device=images.device).view(1, 3, 1, 1)
    share = torch.where(spread > 0, depth / spread.clamp(min=1), red)
    return to_bytes(top - top * wanted * share)


def contrast(images: Tensor, job: Job) -> Tensor:
    """Move every value towards its channel's mean."""
    # An integer sum is the same in every order.
    pixels = images.shape[-1] * images.shape[-2]
    mean = images.sum((2, 3), keepdim=True, dtype=torch.int64).double() / pixels
    return to_bytes(images * job.setting + (mean * (1 - job.setting)).float())


def pixelate(images: Tensor, job: Job) -> Tensor:
    """Shrink by averaging, enlarge by repeating."""
    height, width = images.shape[-2:]
    small = (int(height * job.setting), int(width * job.setting))
    rows = _box_matrix(height, small[0], images.device)
    columns = _box_matrix(width, small[1], images.device)
    # Rounded between the passes as well, as Pillow does.
    wide = torch.matmul(images.float(), columns.T).add_(0.5).floor_()
    blocks = torch.matmul(rows, wide).add_(0.5).to(torch.uint8)
    blocks = blocks.index_select(-1, _nearest(small[1], width, images.device))
    return blocks.index_select(-2, _nearest(small[0], height, images.device))


@lru_cache(maxsize=64)
def _box_matrix(n: int, m: int, device: torch.device) -> Tensor:
    """[m, n]: each output averages the inputs whose centres lie in its share (Pillow's BOX)."""
    scale = n / m
    centre = (torch.arange(m, dtype=torch.float64) + 0.5) * scale
    pixel = torch.arange(n, dtype=torch.float64) + 0.5
    distance = (pixel - centre[:, None]) / scale
    inside = ((distance > -0.5) & (distance <= 0.5)).double()
    return (inside / inside.sum(1, keepdim=True)).to(device, torch.float32)


@lru_cache(maxsize=64)
def _nearest(n: int, m: int, device: torch.device) -> Tensor:
    """int64 [m]: the input under the centre of each of m >= n outputs."""
    return ((torch.arange(m, device=device) * 2 + 1) * n).div(2 * m, rounding_mode="floor")


def jpeg_compression(images: Tensor, job: Job) -> Tensor:
    """Encode and decode as JPEG (Pillow, on the CPU)."""
    out = []
    for picture in images.permute(0, 2, 3, 1).contiguous().cpu().numpy():
        buffer = BytesIO()
        Image.fromarray(picture).save(buffer, "JPEG", quality=job.setting)
        out.append(torch.from_numpy(np.array(Image.open(buffer))))
    return torch.stack(out).permute(0, 3, 1, 2).contiguous().to(images.device)


def elastic_transform(images: Tensor, job: Job) -> Tensor:
    """Move the picture by a random affine map, then every pixel by a smooth random displacement."""
    height, width = images.shape[-2:]
    short = min(height, width)
    reach, sigma, corner = (short * c for c in job.setting)
    shift = job.streams.uniform(6, draw=0, low=-corner, high=corner).view(-1, 3, 2)
    pixels = torch.stack(
        torch.meshgrid(
            torch.arange(height, dtype=torch.float32, device=images.device),
            torch.arange(width, dtype=torch.float32, device=images.device),
            indexing="ij",
        ),
        -1,
    )  # [H, W, (y, x)]
    levels = _sample(images.float(), _affine(shift, pixels, height, width), edge=False)
    if reach:
        field = job.streams.uniform(2 * height * width, draw=1, low=-1, high=1)
        field = filters.gaussian(field.view(-1, 2, height, width), sigma, 3.0, "symmetric")
        levels = _sample(levels, pixels + field.permute(0, 2, 3, 1) * reach, edge=True)
    return to_bytes(levels)


def _affine(shift: Tensor, pixels: Tensor, height: int, width: int) -> Tensor:
    """[B, H, W, 2]: where each pixel comes from when three corners move by `shift` [B, 3, (x, y)].

    The corners are those of a square around the centre, of two thirds of the shorter side.
    """
    half = min(height, width) // 3
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], device=shift.device)
    centre = torch.tensor([width // 2, height // 2], device=shift.device)
    before = centre + half * signs
    after = before + shift
    # The inverse of a 2 x 2 matrix by hand: elementwise, hence the same in every batch.
    (ux, uy), (vx, vy) = (after[:, 1] - after[:, 0]).T, (after[:, 2] - after[:, 0]).T
    inverse = torch.stack([vy, -vx, -uy, ux], -1).view(-1, 2, 2) / (ux * vy - vx * uy).view(
        -1, 1, 1
    )
    sides = (before[1:] - before[0]).T
    (a, b), (c, d) = (
        sides[:, :1, None] * inverse[:, 0] + sides[:, 1:, None] * inverse[:, 1]
    ).permute(0, 2, 1)[..., None, None]
    y = pixels[..., 0] - after[:, 0, 1, None, None]
    x = pixels[..., 1] - after[:, 0, 0, None, None]
    return torch.stack([before[0, 1] + c * x + d * y, before[0, 0] + a * x + b * y], -1)


def _sample(levels: Tensor, where: Tensor, edge: bool) -> Tensor:
    """Read float images at fractional (y, x), mirrored at the border; `edge` repeats the edge."""
    size = torch.tensor(levels.shape[-2:], device=levels.device)
    grid = (2 * where + 1) / size - 1 if edge else 2 * where / (size - 1) - 1
    return F.grid_sample(
        levels, grid.flip(-1), mode="bilinear", padding_mode="reflection", align_corners=not edge
    )
