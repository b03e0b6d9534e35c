"""An ImageNet-C-style tree from any folder of images: parallel, resumable, no half-written file."""

import hashlib
import json
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Literal

import torch
import tyro
from PIL import Image
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
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
_LINE_EVERY = 10.0  # seconds between lines where there is no terminal


@dataclass(frozen=True)
class CorruptOptions:
    """Write corrupted copies of the images in SRC to DST, laid out as ImageNet-C."""

    src: tyro.conf.Positional[Path]
    """Folder of images, usually one folder a class."""
    dst: tyro.conf.Positional[Path]
    """Where to write <corruption>/<severity>/<class>/<name>.JPEG; a stopped run continues there."""
    only: tuple[str, ...] = CLASSICAL
    """Corruptions to write: the 15 of ImageNet-C unless named."""
    severity: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Severities to write."""
    workers: int = 0
    """Processes; 0 takes one a CPU core."""
    seed: int = 0
    """Seed of the random draws, which further depend on the image's number and the corruption."""
    size: int = 224
    """Side of the centre crop (shorter side resized to 256/224 of it first); 0 keeps the size."""
    quality: int = 85
    """JPEG quality of the files."""
    frost_folder: Path | None = None
    """Folder of ImageNet-C's six frost photographs; procedural ice without it."""
    on_error: Literal["skip", "fail"] = "skip"
    """Whether an unreadable image is named, counted and skipped, or ends the run."""


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


def corrupt_tree(options: CorruptOptions, console: Console | None = None) -> CorruptSummary:
    """Write the corrupted copies that `options.dst` does not hold yet.

    An image's random draws come from its place in the sorted list of the source, so that any
    number of workers and interruptions gives the same files. Run once at a time for one target.
    Until a run ends, the folders that it writes to hold a file that says so, for which
    `moetta.data` refuses them.

    Raises:
        ValueError: If an option is wrong, the target was made with other settings, or an image is
            unreadable and `on_error` is "fail", or all are.
        FileNotFoundError: If the source, or a frost photograph, is missing.
    """
    console = console or Console(stderr=True)
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
    with _Meter(console, total=len(tasks) * len(folders)) as meter:
        for result in _run(tasks, options.workers or os.cpu_count() or 1):
            if result.problem is not None:
                if options.on_error == "fail":
                    raise ValueError(
                        f"{result.problem}; repair or remove it, or let on_error be 'skip'"
                    )
                console.print(f"skipped: {result.problem}", markup=False, soft_wrap=True)
                unreadable.append((result.relative, result.problem))
            written += result.written
            present += result.present
            meter.advance(result.written + result.present)
    if len(unreadable) == len(images):
        raise ValueError(f"none of the {len(images):,} images of {options.src} could be read")
    for folder in folders:
        (folder / INCOMPLETE).unlink(missing_ok=True)
    console.print(
        f"{written} written, {present} already there, {len(unreadable)} images skipped",
        highlight=False,
    )
    return CorruptSummary(
        len(images), written, present, tuple(sorted(unreadable)), time.monotonic() - start
    )


def find_images(src: Path) -> list[str]:
    """The images under `src`, relative and sorted: folder by folder, as torchvision's ImageFolder.

    Raises:
        FileNotFoundError: If `src` is not a folder.
        ValueError: If it holds no image.
    """
    if not src.is_dir():
        raise FileNotFoundError(f"{src} is not a folder: name one that holds images")
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
        raise ValueError(f"{src} holds no image ({', '.join(sorted(IMG_EXTENSIONS))})")
    return found


def _check(options: CorruptOptions) -> list[str]:
    """Refuse what cannot work before anything is written; return the images."""
    for name in options.only:
        check_name(name)
    if not options.only or not options.severity:
        raise ValueError("name at least one corruption and one severity")
    if bad := [s for s in options.severity if s not in (1, 2, 3, 4, 5)]:
        raise ValueError(f"severity must be within 1 .. 5, got {bad}")
    if options.size != 0 and options.size < MIN_SIDE:
        raise ValueError(
            f"size must be at least {MIN_SIDE}, or 0 to keep the size, got {options.size}"
        )
    if not 1 <= options.quality <= 100:
        raise ValueError(f"quality must be within 1 .. 100, got {options.quality}")
    if options.workers < 0:
        raise ValueError(f"workers must not be negative, got {options.workers}")
    if options.frost_folder is not None:
        check_folder(options.frost_folder)
    src, dst = options.src.resolve(), options.dst.resolve()
    if dst == src or src in dst.parents:
        raise ValueError(f"{options.dst} lies within {options.src}: choose a target outside it")
    images = find_images(options.src)
    owner: dict[str, str] = {}
    for relative in images:
        target = Path(relative).with_suffix(".JPEG").as_posix()
        if target in owner:
            raise ValueError(f"{owner[target]} and {relative} would both become {target}")
        owner[target] = relative
    return images


def _claim(options: CorruptOptions, images: Sequence[str]) -> None:
    """Record the settings in the target, or refuse a target that was made with others."""
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
                f"{options.dst} was begun with other settings ({', '.join(changed)} differ): "
                "use the same ones to continue, or choose another target"
            )
    else:
        write_atomically(path, json.dumps(wanted, indent=1).encode())


def _begin(folder: Path) -> None:
    """Mark a folder as incomplete, and clear what a killed run left half-written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INCOMPLETE).write_text("moetta corrupt has not finished here; run it again.\n")
    for path in folder.rglob(".*.tmp"):
        if _LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _run(tasks: Sequence[_Task], workers: int) -> Iterator[_Result]:
    """Do the tasks, in this process or in several; results come as they are ready."""
    workers = min(workers, len(tasks))
    if workers == 1:
        yield from map(_corrupt_image, tasks)
        return
    # Not forked from here: a copy of a threaded torch can hang. A fork server imports torch once.
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

    # A parent that is killed cannot stop its workers: they watch it.
    threading.Thread(target=leave_with_parent, daemon=True).start()


def _corrupt_image(task: _Task) -> _Result:
    """Write what is missing of one image's copies."""
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
        picture = Image.fromarray(out[0].permute(1, 2, 0).contiguous().numpy())
        picture.save(buffer, "JPEG", quality=options.quality, optimize=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, buffer.getvalue(), sync=False)
    return _Result(task.relative, written=len(wanted), present=present)


def _load(path: Path, size: int) -> Tensor:
    """uint8 [1, 3, H, W]: as ImageNet-C prepares it, or as it is for size 0."""
    image = read_rgb(path)
    if size:
        image = center_crop(resize(image, [round(size * 256 / 224)]), [size, size])
    if min(image.size) < MIN_SIDE:
        raise UnreadableImage(
            f"{path} has {image.width} x {image.height} pixels, {MIN_SIDE} are the least"
        )
    return pil_to_tensor(image)[None]


class _Meter:
    """A bar with the time left on a terminal; elsewhere a line now and then."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total = console, total
        self._done, self._start, self._last = 0, time.monotonic(), time.monotonic()
        self._bar = Progress(
            TextColumn("corrupting"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> "_Meter":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, count: int) -> None:
        """Count `count` more files as done."""
        self._done += count
        self._bar.advance(self._task, count)
        now = time.monotonic()
        finished = self._done >= self._total
        due = self._done > 0 and now - self._last >= _LINE_EVERY
        if not self._console.is_terminal and (finished or due):
            self._last = now
            left = (now - self._start) * (self._total - self._done) / self._done
            self._console.print(
                f"{self._done}/{self._total} files ({self._done / self._total:.0%}), "
                f"about {left:.0f} s left",
                markup=False,
                highlight=False,
            )
