"""Draws every corruption at every severity in one image."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from moetta.data.corruptions import ALL, corrupt

_LABEL, _GAP = 14, 4


def corruption_grid(image: np.ndarray, path: Path, side: int = 80) -> None:
    """Write a grid: one row per corruption, one column per severity, in two halves.

    Args:
        image: uint8 [H, W, 3]; it is corrupted at full size and then shrunk.
        path: Where to write it; the suffix decides the format.
        side: Width of each image in the grid.
    """
    batch = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].contiguous()
    height = round(side * image.shape[0] / image.shape[1])
    rows = (len(ALL) + 1) // 2
    block = 5 * (side + _GAP)
    cell = height + _LABEL + _GAP
    canvas = Image.new("RGB", (2 * block + 3 * _GAP, rows * cell + _GAP), "white")
    draw = ImageDraw.Draw(canvas)
    for place, name in enumerate(ALL):
        left = _GAP + (place // rows) * (block + _GAP)
        top = _GAP + (place % rows) * cell
        draw.text((left, top), name.replace("_", " "), fill="black")
        for severity in range(1, 6):
            out = corrupt(batch, name, severity, index=[0])
            small = Image.fromarray(out[0].permute(1, 2, 0).contiguous().numpy())
            small = small.resize((side, height), Image.Resampling.BOX)
            canvas.paste(small, (left + (severity - 1) * (side + _GAP), top + _LABEL))
    if path.suffix.lower() == ".png":
        # Noise does not compress well; with a palette the file has a third of the size.
        canvas = canvas.quantize(256)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path, optimize=True)
