"""Small image folders for tests."""

import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image


def jpeg(width: int = 60, height: int = 40, seed: int = 0) -> bytes:
    """A JPEG of smooth random colours."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(out, "JPEG")
    return out.getvalue()


def make_tree(
    root: Path, classes: Iterable[str], images: int = 1, size: tuple[int, int] = (60, 40)
) -> Path:
    """Writes `root/<class>/<i>.JPEG`, each picture unlike the others of its class."""
    pictures = [jpeg(*size, seed=i) for i in range(images)]
    for name in classes:
        folder = root / name
        folder.mkdir(parents=True)
        for i, picture in enumerate(pictures):
            (folder / f"{i}.JPEG").write_bytes(picture)
    return root
