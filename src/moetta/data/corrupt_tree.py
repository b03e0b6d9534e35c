"""Writes an ImageNet-C-style tree from any folder of images: in parallel, resumable, atomic."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.v2.functional import center_crop, pil_to_tensor, resize

from moetta.data.corruptions import CLASSICAL, MIN_SIDE, check_name, corrupt
from moetta.data.corruptions.textures import check_folder
from moetta.data.domains import UnreadableImage
from moetta.data.image_files import INCOMPLETE, read_rgb
from moetta.files import write_atomically

SETTINGS_FILE = ".moetta-corrupt.json"
_LEFTOVER = re.compile(r"\..+\.JPEG\.\w+\.tmp")  # as write_atomically names them

Report = Callable[[int, int, str | None], None]
"""Called after each image with the files done, the files in total, and why the image was skipped
(None if it was not)."""


@dataclass(frozen=True)
class CorruptOptions:
    """What to corrupt, how, and where to write it."""

    src: Path
    """Folder of images, usually with one folder per class."""
    dst: Path
    """Where to write <corruption>/<severity>/<class>/<name>.JPEG; a stopped run continues there."""
    only: tuple[str, ...] = CLASSICAL
    """Corruptions to write; by default the 15 of ImageNet-C."""
    severity: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Severities to write."""
    workers: int = 0
    """Processes; 0 means one per CPU core."""
    seed: int = 0
    """Seed of the random draws, which also depend on the image's number and the corruption."""
    size: int = 224
    """Side of the centre crop, after the shorter side is resized to 256/224 of it; 0 keeps the
    size."""
    quality: int = 85
    """JPEG quality of the files."""
    frost_folder: Path | None = None
    """Folder of ImageNet-C's six frost photographs; by default frost is procedural."""
    on_error: Literal["skip", "fail"] = "skip"
    """What to do with an image that cannot be read: skip it (it is named and counted), or fail."""


@dataclass(frozen=True)
class CorruptSummary:
    """What a run did."""

    images: int
    written: int
    present: int
    unreadable: tuple[tuple[str, str], ...] = field(default=())
    seconds: float = 0.0


@dataclass(frozen=True)
class _Task:
    options: CorruptOptions
    index: int
    relative: str  # to options.src, with slashes


@dataclass(frozen=True)
class _Result:
    relative: str
    written: int = 0
    present: int = 0
    problem: str | None = None


def corrupt_tree(options: CorruptOptions, report: Report | None = None) -> CorruptSummary:
    """Write the corrupted copies that are not in `options.dst` yet.

    An image's random draws come from its place in the sorted list of images, so that any number of
    workers and interruptions gives the same files. Do not run it twice at a time for one target.
    Until it is done, the folders that it writes to hold a file that says so, and `moetta.data`
    refuses to read them.

    Args:
        options: What to write, and how.
        report: Called after each image.

    Raises:
        ValueError: If an option is wrong, the target was begun with other settings, or an image
            cannot be read and `on_error` is "fail", or no image can be read.
        FileNotFoundError: If the folder of images, or a frost photograph, is missing.
    """
    start = time.monotonic()
    once = tuple(dict.fromkeys(options.only)), tuple(dict.fromkeys(options.severity))
    options = replace(options, only=once[0], severity=once[1])
    images = _check(options)
    options.dst.mkdir(parents=True, exist_ok=True)
    _claim(options, images)
    folders = [options.dst / name / str(s) for name in options.only for s in options.severity]
    for folder in folders:
        _begin(folder)

    tasks = [_Task(options, i, relative) for i, relative in enumerate(images)]
    written = present = 0
    unreadable: list[tuple[str, str]] = []
    for result in _run(tasks, options.workers or os.cpu_count() or 1):
        if result.problem is not None:
            if options.on_error == "fail":
                raise ValueError(f"{result.problem}; repair or remove it, or set on_error to skip")
            unreadable.append((result.relative, result.problem))
        written += result.written
        present += result.present
        if report is not None:
            report(written + present, len(tasks) * len(folders), result.problem)
    if len(unreadable) == len(images):
        raise ValueError(f"none of the {len(images):,} images in {options.src} could be read")
    for folder in folders:
        (folder / INCOMPLETE).unlink(missing_ok=True)
    return CorruptSummary(
        len(images), written, present, tuple(sorted(unreadable)), time.monotonic() - start
    )


def find_images(src: Path) -> list[str]:
    """The images under `src` as relative paths, in the order of torchvision's ImageFolder.

    Raises:
        FileNotFoundError: If `src` is not a folder.
        ValueError: If it holds no image.
    """
    if not src.is_dir():
        raise FileNotFoundError(f"{src} is not a folder; name one that holds images")
    found = []
    for root, folders, files in os.walk(src, followlinks=True):
        folders.sort()
        here = Path(root).relative_to(src)
        found += [
            (here / name).as_posix()
            for name in sorted(files)
            if Path(name).suffix.lower() in IMG_EXTENSIONS
        ]
    if not found:
        raise ValueError(f"{src} holds no images ({', '.join(sorted(IMG_EXTENSIONS))})")
    return found


def _check(options: CorruptOptions) -> list[str]:
    """Refuse wrong options before anything is written; return the images."""
    for name in options.only:
        check_name(name)
    if not options.only or not options.severity:
        raise ValueError("name at least one corruption and one severity")
    if bad := [s for s in options.severity if s not in (1, 2, 3, 4, 5)]:
        raise ValueError(f"severity must be 1 to 5, got {bad}")
    if options.size != 0 and options.size < MIN_SIDE:
        raise ValueError(
            f"size must be at least {MIN_SIDE}, or 0 to keep each image's size, got {options.size}"
        )
    if not 1 <= options.quality <= 100:
        raise ValueError(f"quality must be 1 to 100, got {options.quality}")
    if options.workers < 0:
        raise ValueError(f"workers must be at least 0, got {options.workers}")
    if options.frost_folder is not None:
        check_folder(options.frost_folder)
    src, dst = options.src.resolve(), options.dst.resolve()
    if dst == src or src in dst.parents:
        raise ValueError(f"{options.dst} is inside {options.src}; choose a target outside it")
    images = find_images(options.src)
    owner: dict[str, str] = {}
    for relative in images:
        target = Path(relative).with_suffix(".JPEG").as_posix()
        if target in owner:
            raise ValueError(f"{owner[target]} and {relative} would both become {target}")
        owner[target] = relative
    return images


def _claim(options: CorruptOptions, images: Sequence[str]) -> None:
    """Record the settings in the target, or refuse a target that was begun with others."""
    wanted = {
        "seed": options.seed,
        "size": options.size,
        "quality": options.quality,
        "frost": "photographs" if options.frost_folder else "procedural",
        "images": len(images),
        "names": hashlib.sha256("\n".join(images).encode()).hexdigest(),
    }
    path = options.dst / SETTINGS_FILE
    if path.exists():
        found = json.loads(path.read_text())
        if changed := [k for k in wanted if found.get(k) != wanted[k]]:
            raise ValueError(
                f"{options.dst} was begun with other settings ({', '.join(changed)} differ); use "
                "the same ones to continue, or choose another target"
            )
    else:
        write_atomically(path, json.dumps(wanted, indent=1).encode())


def _begin(folder: Path) -> None:
    """Mark a folder as incomplete, and remove half-written files of a killed run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INCOMPLETE).write_text("moetta corrupt has not finished here; run it again.\n")
    for path in folder.rglob(".*.tmp"):
        if _LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _run(tasks: Sequence[_Task], workers: int) -> Iterator[_Result]:
    """Do the tasks in this process or in several, and yield results as they are ready."""
    workers = min(workers, len(tasks))
    if workers == 1:
        yield from map(_corrupt_image, tasks)
        return
    # A plain fork of a threaded torch can hang; a fork server imports torch once.
    ways = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in ways else "spawn")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker)
    try:
        futures: list[Future[_Result]] = [pool.submit(_corrupt_image, task) for task in tasks]
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker() -> None:
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()

    def leave_with_parent() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    # A parent that is killed cannot stop its workers, so they watch it.
    threading.Thread(target=leave_with_parent, daemon=True).start()


def _corrupt_image(task: _Task) -> _Result:
    """Write those copies of one image that are missing."""
    options = task.options
    name = Path(task.relative).with_suffix(".JPEG")
    wanted = [
        (corruption, severity, target)
        for corruption in options.only
        for severity in options.severity
        if not (target := options.dst / corruption / str(severity) / name).exists()
    ]
    present = len(options.only) * len(options.severity) - len(wanted)
    if not wanted:
        return _Result(task.relative, present=present)
    try:
        image = _load(options.src / task.relative, options.size)
    except UnreadableImage as error:
        return _Result(task.relative, present=present, problem=str(error))
    for corruption, severity, target in wanted:
        out = corrupt(
            image,
            corruption,
            severity,
            index=[task.index],
            seed=options.seed,
            frost_folder=options.frost_folder,
        )
        buffer = BytesIO()
        copy = Image.fromarray(out[0].permute(1, 2, 0).contiguous().numpy())
        copy.save(buffer, "JPEG", quality=options.quality, optimize=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, buffer.getvalue(), sync=False)
    return _Result(task.relative, written=len(wanted), present=present)


def _load(path: Path, size: int) -> Tensor:
    """An image as uint8 [1, 3, H, W], resized and cropped as in ImageNet-C unless size is 0."""
    image = read_rgb(path)
    if size:
        image = center_crop(resize(image, [round(size * 256 / 224)]), [size, size])
    if min(image.size) < MIN_SIDE:
        raise UnreadableImage(
            f"{path} has {image.width} x {image.height} pixels, expected at least {MIN_SIDE}"
        )
    loaded: Tensor = pil_to_tensor(image)
    return loaded[None]
