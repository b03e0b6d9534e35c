"""From a cell to what it runs on: model, stream, source images; and the card that records it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import moetta
from moetta.bench.cell import BASELINE, Cell, is_named, resolve_config
from moetta.bench.finished import folder_name, weights_file_sha256
from moetta.bench.interrupts import Stopped
from moetta.bench.progress import Refused
from moetta.core.adapter import Adapter
from moetta.core.config import Config
from moetta.data import (
    Preprocess,
    Stream,
    draw_images,
    embedded,
    image_folder,
    mixture,
    preprocess_for,
    source_images,
    stream_options,
    stream_spec,
)
from moetta.data import stream as named_stream
from moetta.data.named_streams import check_suits_embedded
from moetta.data.preprocess import own_preprocess
from moetta.methods import find
from moetta.nn.ranks import Ranks
from moetta.results.runs import SCHEMA
from moetta.zoo.by_name import load_model


@dataclass(frozen=True)
class Prepared:
    """A cell whose model is loaded and whose stream is described.

    Attributes:
        cell: the cell.
        model: the source model.
        stream: the whole stream, from its first batch.
        preset: where the configuration started.
        config: the method's configuration.
    """

    cell: Cell
    model: nn.Module
    stream: Stream
    preset: str
    config: Config

    @cached_property
    def baseline(self) -> Adapter:
        """The source model as an adapter."""
        return moetta.adapt(self.model, BASELINE, seed=self.cell.seed)

    def adapter(
        self, stop: Callable[[], bool] = lambda: False, ranks: Ranks | None = None
    ) -> Adapter:
        """The method on this model, shown the source images if it needs them.

        Args:
            stop: asked before each batch of source images.
            ranks: the processes that share every batch, if there are several.

        Raises:
            Refused: the method does not serve this model.
            Stopped: ``stop`` said yes.
        """
        with contextlib.nullcontext() if ranks is None else ranks.together():
            source = self.source_images(stop) if self.config.needs_source else None
        group = None if ranks is None else ranks.group
        try:
            return moetta.adapt(self.model, self.config, source=source, process_group=group)
        except ValueError as error:
            if type(error) is not ValueError:  # about the ranks, not about the model
                raise
            raise Refused(str(error)) from error

    @cached_property
    def protocol(self) -> dict[str, Any]:
        """Everything that must be the same for two results to be comparable."""
        described = self.stream.card()
        described.pop("skipped")
        return {
            "model": {
                "name": self.cell.model_name,
                "weights_sha256": self.baseline.fingerprint(),
                "parameters": sum(p.numel() for p in self.model.parameters()),
            },
            "preprocess": described.pop("preprocessing"),
            "stream": described,
            "source": describe_source(self.cell),
            "mask": self.stream.mask,
            "reset": "never",
            "scored": "before update",
        }

    def card(self) -> dict[str, Any]:
        """Everything needed to run this cell again, and to know what its numbers mean."""
        cell, method = self.cell, find(self.cell.method)
        return {
            "schema": SCHEMA,
            "moetta": moetta.__version__,
            "method": method.name,
            "title": method.title,
            "drawn": None if method.drawn is None else dataclasses.asdict(method.drawn),
            "preset": self.preset,
            "config": self.config.to_dict(),
            "variant": self.variant,
            "experiment": cell.experiment,
            "cell": dataclasses.asdict(cell),
            "protocol": self.protocol,
            "weights_file_sha256": weights_file_sha256(cell),
            "seed": cell.seed,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "timm": timm.__version__,
                "moetta": moetta.__version__,
            },
            "device": cell.device,
            "threads": torch.get_num_threads(),
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    @property
    def variant(self) -> str | None:
        """The name of this configuration in results; None if its overrides change nothing.

        A sweep passes through the default configuration: that run is the same under any name.
        """
        ordinary = dataclasses.replace(self.cell, overrides=())
        changed = resolve_config(self.cell)[1] != resolve_config(ordinary)[1]
        return self.cell.variant if changed else None

    @property
    def key(self) -> str:
        """The name of this cell's folder: readable, and different whenever the run differs."""
        return self._key(find(self.cell.method).name, self.variant, self.config)

    @property
    def baseline_key(self) -> str:
        """The name of the folder of noadapt's run on the same stream."""
        return self._key(BASELINE, None, self.baseline.config)

    def _key(self, method: str, variant: str | None, config: Config) -> str:
        kind = self.cell.device.partition(":")[0]  # times on a GPU are not those on a CPU
        hashed = json.dumps([self.protocol, method, config.to_dict(), kind], sort_keys=True)
        digest = hashlib.sha256(hashed.encode()).hexdigest()[:8]
        cell = self.cell
        return folder_name(
            cell.model_name, cell.stream_name, method, variant, f"s{cell.seed}", digest
        )

    def source_images(self, stop: Callable[[], bool] = lambda: False) -> Any:
        """Clean images for a method that looks at some before it starts.

        Raises:
            ValueError: the stream comes with none and the cell names no folder.
            Stopped: ``stop`` said yes while they were being read.
        """
        cell, count = self.cell, self.cell.source_images
        if cell.source is not None:
            pre = preprocessing(cell, self.model)
            return _until(stop, draw_images(image_folder(cell.source, pre), count, pre))
        if is_named(cell):
            spec = stream_spec(cell.stream, cell.data)
            expected = None if spec.embedded else preprocessing(cell, self.model)
            images = source_images(spec, cell.data, count, expected, partial=cell.partial)
            return images if isinstance(images, Tensor) else _until(stop, images)
        raise ValueError(
            f"{cell.method} looks at source images before it starts: pass --source FOLDER, with "
            "images like those the model was trained on (class folders; labels are not used)"
        )


def prepare(cell: Cell) -> Prepared:
    """Load a cell's model and describe its stream.

    Raises:
        ValueError: a name or value is wrong.
        FileNotFoundError: files of the model or of a data set are missing.
    """
    cell.check()
    preset, config = resolve_config(cell)
    model = load_model(cell.model, cell.weights, cell.device)
    stream = make_stream(cell, model)
    if own_preprocess(model) is None:  # the model does not say, but the stream knows
        pixels = stream.card()["preprocessing"]
        config = config.with_pixels(tuple(pixels["mean"]), tuple(pixels["std"]))
    return Prepared(cell, model, stream, preset, config)


def make_stream(cell: Cell, model: nn.Module) -> Stream:
    """The cell's stream as its model expects it."""
    names = ("limit", "length", "order", "batch_size")
    chosen = {name: getattr(cell, name) for name in names}
    options: dict[str, Any] = {k: v for k, v in chosen.items() if v is not None}
    options |= {"seed": cell.seed, "workers": cell.loaders}
    options |= {"on_error": cell.on_error, "frost_folder": cell.frost_folder}
    if is_named(cell) and cell.data is None:
        try:
            check_suits_embedded(model)
        except ValueError as error:
            raise ValueError(f"{cell.model}: {error}") from error
        del options["on_error"], options["frost_folder"]  # its images are generated, not read
        return embedded.stream(cell.stream, severity=cell.severity, **options)
    pre = preprocessing(cell, model)
    if is_named(cell):
        assert cell.data is not None
        return named_stream(
            cell.stream,
            cell.data,
            model=model,
            preprocess=pre,
            severity=cell.severity,
            mask=cell.mask,
            partial=cell.partial,
            **options,
        )
    if Path(cell.stream).is_dir():
        domain = image_folder(cell.stream, pre)
        return Stream([domain], name=cell.stream_name, **stream_options(pre), **options)
    return mixture(cell.stream, model=model, preprocess=pre, **options)


def preprocessing(cell: Cell, model: nn.Module) -> Preprocess:
    """How the model expects its images: as the cell says, or else as the model says."""
    if cell.mean is None or cell.std is None:
        if own_preprocess(model) is None:
            raise ValueError(
                f"{cell.model} does not say what images it expects: give --mean, --std (three "
                "numbers each, for pixels in 0..1) and --size"
            )
        return preprocess_for(model, cell.preprocess)
    side = cell.size or 224
    return preprocess_for(model, Preprocess(mean=cell.mean, std=cell.std, size=(side, side)))


def describe_source(cell: Cell) -> dict[str, Any] | None:
    """Which source images methods may look at: part of the protocol, even if none are needed."""
    if cell.source is not None:
        return {"images": cell.source_images, "from": f"folder {Path(cell.source).name}"}
    if not is_named(cell):
        return None
    origin = stream_spec(cell.stream, cell.data).clean.origin
    return {"images": cell.source_images, "from": origin}


def _until(stop: Callable[[], bool], batches: Iterator[Tensor]) -> Iterator[Tensor]:
    """The batches; raises `Stopped` as soon as ``stop`` says yes."""
    for batch in batches:
        if stop():
            raise Stopped
        yield batch
