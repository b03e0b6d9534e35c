"""CPU time of each corruption per 224-pixel image, compared with imagecorruptions-imaug.

    python benchmarks/corruptions.py [--severity 5] [--repeats 7] [--images 8] [--threads 1]

The two take turns on the same photographs, so that a busy machine slows both. The CPU time of the
process counts, not the wall clock, and the fastest of several repeats. Ours gets the images as one
batch; the oracle gets them one by one, as its interface requires.
"""

import argparse
import time
from collections.abc import Callable

import cv2
import imagecorruptions as oracle
import numpy as np
import torch
from sklearn.datasets import load_sample_images

from moetta.data.corruptions import ALL, CLASSICAL, corrupt


def photographs(count: int) -> np.ndarray:
    """Different 224-pixel crops of scikit-learn's two photographs, uint8 [count, H, W, 3]."""
    photos = load_sample_images().images
    crops = []
    for i in range(count):
        photo, shift = photos[i % 2], 29 * (i // 2)
        top = shift % (photo.shape[0] - 224)
        left = 3 * shift % (photo.shape[1] - 224)
        crops.append(photo[top : top + 224, left : left + 224])
    return np.stack(crops)


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call, over all threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--severity", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cv2.setNumThreads(args.threads)
    arrays = photographs(args.images)
    batch = torch.from_numpy(arrays).permute(0, 3, 1, 2).contiguous()

    best: dict[str, tuple[float, float]] = {}
    for name in ALL:

        def ours(name: str = name) -> None:
            corrupt(batch, name, args.severity, index=range(len(batch)))

        def theirs(name: str = name) -> None:
            for image in arrays:
                oracle.corrupt(image, args.severity, name)

        ours(), theirs()  # fill caches, compile
        turns = [(seconds(ours), seconds(theirs)) for _ in range(args.repeats)]
        a, b = (1e3 * min(side) / len(arrays) for side in zip(*turns, strict=True))
        best[name] = a, b

    print(
        f"CPU ms per 224-px image, severity {args.severity}, {args.threads} thread(s), "
        f"best of {args.repeats} interleaved runs of {args.images} images"
    )
    print(f"{'corruption':20}{'moetta':>9}{'oracle':>9}{'ratio':>8}")
    for name, (a, b) in best.items():
        print(f"{name:20}{a:9.2f}{b:9.2f}{b / a:7.1f}x")
    for label, names in (("the 15 classical", CLASSICAL), ("all 19", ALL)):
        a, b = (sum(best[name][side] for name in names) for side in (0, 1))
        print(f"{label:20}{a:9.2f}{b:9.2f}{b / a:7.1f}x")


if __name__ == "__main__":
    main()
