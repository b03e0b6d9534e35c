"""Spatter: drops of water with shaded edges, or splashes of mud."""

import torch
from torch import Tensor
from torch.nn import functional as F

from moetta.data.corruptions import filters
from moetta.data.corruptions.core import Job, to_bytes

_WATER = (175.0, 238.0, 238.0)
_MUD = (63.0, 42.0, 20.0)
_EDGE_LOW, _EDGE_HIGH = 50, 150
_TAN_22 = 13573 / 2**15
_REACH = 20.0  # edges are shaded this far, in pixels
# The moves of a 5 x 5 chamfer distance and their lengths.
_MOVES = (
    *((step, 1.0) for step in ((0, 1), (1, 0))),
    *((step, 1.4) for step in ((1, 1), (1, -1))),
    *((step, 2.1969) for step in ((1, 2), (2, 1), (1, -2), (2, -1))),
)


def spatter(images: Tensor, job: Job) -> Tensor:
    """Throw water (severities 1 to 3) or mud (4 and 5) on the image."""
    mean, deviation, sigma, threshold, strength, mud = job.setting
    batch, _, height, width = images.shape
    noise = job.streams.normal(height * width).view(batch, height, width)
    liquid = filters.gaussian(noise.mul_(deviation).add_(mean), sigma)
    levels = images.float()
    if mud:
        cover = filters.gaussian((liquid > threshold).float(), strength)[:, None]
        cover = torch.where(cover < 0.8, 0, cover)
        colour = torch.tensor(_MUD, device=images.device).view(1, 3, 1, 1)
        return to_bytes(torch.lerp(levels, colour.expand_as(levels), cover))
    drops = torch.where(liquid < threshold, 0, liquid * 255).clamp_(0, 255).floor_()
    film = drops * _rim_light(drops)
    film = film / film.amax((1, 2), keepdim=True).clamp(min=1) * strength
    colour = torch.tensor(_WATER, device=images.device).view(1, 3, 1, 1)
    return to_bytes(levels.addcmul_(film[:, None], colour))


def _rim_light(drops: Tensor) -> Tensor:
    """Light falling on the drops from one corner, from the distance to their edges [B, H, W]."""
    distance = _distance(_edges(drops))
    relief = _equalise(_mean3(distance).floor_())
    taps = torch.tensor([[-2, -1, 0], [-1, 1, 1], [0, 1, 2.0]], device=drops.device)
    lit = F.conv2d(F.pad(relief[:, None], (1,) * 4, mode="reflect"), taps[None, None])[:, 0]
    return _mean3(lit.clamp_(0, 255)).add_(0.5).floor_()


def _mean3(field: Tensor) -> Tensor:
    padded = F.pad(field[:, None], (1,) * 4, mode="reflect")
    return F.avg_pool2d(padded, 3, stride=1)[:, 0]


def _edges(grey: Tensor) -> Tensor:
    """Canny edges of whole-numbered levels [B, H, W], as bool."""
    p = F.pad(grey[:, None], (1,) * 4, mode="replicate")[:, 0]
    smooth_y = p[:, :-2] + 2 * p[:, 1:-1] + p[:, 2:]
    smooth_x = p[:, :, :-2] + 2 * p[:, :, 1:-1] + p[:, :, 2:]
    slope_x = smooth_y[:, :, 2:] - smooth_y[:, :, :-2]
    slope_y = smooth_x[:, 2:] - smooth_x[:, :-2]
    across, down = slope_x.abs(), slope_y.abs()
    steep = across + down
    m = F.pad(steep, (1,) * 4)
    height, width = grey.shape[-2:]

    def neighbour(dy: int, dx: int) -> Tensor:
        return m[:, 1 + dy : 1 + dy + height, 1 + dx : 1 + dx + width]

    falling = slope_x * slope_y >= 0
    diagonal = torch.where(
        falling,
        (steep > neighbour(-1, -1)) & (steep > neighbour(1, 1)),
        (steep > neighbour(-1, 1)) & (steep > neighbour(1, -1)),
    )
    sideways = (steep > neighbour(0, -1)) & (steep >= neighbour(0, 1))
    upright = (steep > neighbour(-1, 0)) & (steep >= neighbour(1, 0))
    ridge = torch.where(down > (_TAN_22 + 2) * across, upright, diagonal)
    ridge = torch.where(down < _TAN_22 * across, sideways, ridge)
    weak = ridge & (steep > _EDGE_LOW)
    strong = weak & (steep > _EDGE_HIGH)
    while True:
        grown = F.max_pool2d(strong[:, None].float(), 3, stride=1, padding=1)[:, 0].bool() & weak
        if torch.equal(grown, strong):
            return strong
        strong = grown


def _distance(edges: Tensor) -> Tensor:
    """Chamfer distance to the nearest edge, at most 20 [B, H, W].

    The moves of a shortest path can be made in any order, so each direction is done once, by hops
    that double in length.
    """
    field = torch.where(edges, 0.0, _REACH)
    height, width = field.shape[-2:]
    for (dy, dx), length in _MOVES:
        hop = 1
        while hop * length < _REACH and hop * max(dy, abs(dx)) < min(height, width):
            y, x = hop * dy, hop * abs(dx)
            one, other = field[:, y:], field[:, : height - y]
            one, other = (
                (one[..., x:], other[..., : width - x])
                if dx >= 0
                else (one[..., : width - x], other[..., x:])
            )
            here, there = one + hop * length, other + hop * length
            torch.minimum(one, there, out=one)
            torch.minimum(other, here, out=other)
            hop *= 2
    return field


def _equalise(field: Tensor) -> Tensor:
    """Histogram equalisation of whole-numbered levels [B, H, W], per image."""
    batch = len(field)
    level = field.view(batch, -1).long()
    count = torch.zeros(batch, 256, dtype=torch.int64, device=field.device)
    count.scatter_add_(1, level, torch.ones_like(level))
    lowest = level.amin(1, keepdim=True)
    first = count.gather(1, lowest)
    rest = level.shape[1] - first
    spread = (count.cumsum(1) - first).clamp(min=0) * 255 / rest.clamp(min=1)
    table = torch.where(rest > 0, spread.round(), lowest.float())
    return table.gather(1, level).view_as(field)
