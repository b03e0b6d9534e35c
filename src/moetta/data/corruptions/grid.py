"""One picture of every corruption at every severity."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from moetta.data.corruptions import ALL, corrupt

_LABEL, _GAP = 14, 4


def corruption_grid(image: np.ndarray, path: Path, side: int = 80) -> None:
    """Write a grid: a row for each corruption, a column for each severity, in two halves.

    Args:
        image: uint8 [H, W, 3]; it is corrupted at its own size and then shrunk.
        path: Where to write; the suffix names the format.
        side: Width of one picture in the grid.
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
            picture = Image.fromarray(out[0].permute(1, 2, 0).contiguous().numpy())
            picture = picture.resize((side, height), Image.Resampling.BOX)
            canvas.paste(picture, (left + (severity - 1) * (side + _GAP), top + _LABEL))
    if path.suffix.lower() == ".png":
        # Noise does not compress; a palette makes a third of it.
        canvas = canvas.quantize(256)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path, optimize=True)
