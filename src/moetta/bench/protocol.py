"""From a cell to what it runs on: model, stream, source images; and the card that says so."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import platform
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import moetta
from moetta.bench.cell import Cell, is_named, settings
from moetta.bench.models import load_model
from moetta.core.adapter import Adapter
from moetta.core.config import Config
from moetta.data import (
    Domain,
    Preprocess,
    Stream,
    cifar10,
    embedded,
    image_folder,
    imagenet,
    mixture,
    preprocess_for,
)
from moetta.data import stream as named_stream
from moetta.data.named_streams import stream_options
from moetta.data.preprocess import check_preprocess, own_preprocess
from moetta.results.runs import SCHEMA


@dataclass(frozen=True)
class Prepared:
    """A cell whose model is loaded and whose stream is described.

    Attributes:
        cell: the cell.
        model: the source model.
        stream: the whole stream, from its start.
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
        """The source model behind the adapter's interface."""
        return moetta.adapt(self.model, "noadapt", seed=self.cell.seed)

    def adapter(self) -> Adapter:
        """The method on this model; looks at the source images if it has to."""
        source = self.source_images() if self.config.needs_source else None
        return moetta.adapt(self.model, self.config, source=source)

    def from_batch(self, start: int) -> Stream:
        """The same stream, to be read from batch ``start`` on."""
        return make_stream(self.cell, self.model, start)

    @cached_property
    def protocol(self) -> dict[str, Any]:
        """What must be equal for two results to be compared."""
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
        """Everything needed to run this cell again, and to know what its figures mean."""
        cell = self.cell
        return {
            "schema": SCHEMA,
            "moetta": moetta.__version__,
            "method": cell.method,
            "preset": self.preset,
            "config": self.config.to_dict(),
            "variant": self.variant,
            "experiment": cell.experiment,
            "cell": dataclasses.asdict(cell),
            "protocol": self.protocol,
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
        """What the results call this configuration; None if its overrides change nothing.

        A sweep passes through the ordinary configuration: that run is the same by any name.
        """
        ordinary = dataclasses.replace(self.cell, overrides=())
        changed = settings(self.cell)[1] != settings(ordinary)[1]
        return self.cell.variant if changed else None

    @property
    def key(self) -> str:
        """The name of this cell's folder: readable, and different for whatever differs."""
        return self._key(self.cell.method, self.variant, self.config)

    @property
    def baseline_key(self) -> str:
        """The folder in which noadapt's run on the same stream would be."""
        return self._key("noadapt", None, self.baseline.config)

    def _key(self, method: str, variant: str | None, config: Config) -> str:
        kind = self.cell.device.partition(":")[0]  # times on a GPU are not those on a CPU
        hashed = json.dumps([self.protocol, method, config.to_dict(), kind], sort_keys=True)
        digest = hashlib.sha256(hashed.encode()).hexdigest()[:8]
        cell = self.cell
        parts = [cell.model_name, cell.stream_name, method, variant, f"s{cell.seed}", digest]
        return "__".join(re.sub(r"[^A-Za-z0-9.+=-]+", "-", part) for part in parts if part)

    def source_images(self) -> Any:
        """Clean images for a method that looks at the source before it starts.

        Raises:
            ValueError: this stream implies none and the cell names no folder.
        """
        cell, count = self.cell, self.cell.source_images
        if cell.source is None and cell.data is None and is_named(cell):
            return embedded.source_images(count)
        pre = preprocessing(cell, self.model)
        if cell.source is not None:
            return _drawn(image_folder(cell.source, pre), count, pre)
        if cell.stream == "cifar10-c":
            assert cell.data is not None
            return _drawn(cifar10(cell.data, "train", partial=cell.partial), count, pre)
        if cell.data is not None and is_named(cell):
            return _drawn(imagenet("val", cell.data, pre, partial=cell.partial), count, pre)
        raise ValueError(
            f"{cell.method} looks at clean images before it starts: pass --source FOLDER, a folder "
            "of images like those the model was trained on (folders of classes; labels unused)"
        )


def prepare(cell: Cell) -> Prepared:
    """Load a cell's model and describe its stream.

    Raises:
        ValueError: a name or value is wrong.
        FileNotFoundError: a model's or data set's files are not there.
    """
    cell.check()
    preset, config = settings(cell)
    model = load_model(cell.model, cell.weights, cell.device)
    stream = make_stream(cell, model)
    if getattr(config, "mean", 0) is None and own_preprocess(model) is None:
        # CoTTA un-normalises pictures to augment them; where the model is silent, the stream knows.
        pixels = stream.card()["preprocessing"]
        known = {name: tuple(pixels[name]) for name in ("mean", "std")}
        config = dataclasses.replace(config, **known)  # type: ignore[arg-type]
    return Prepared(cell, model, stream, preset, config)


def make_stream(cell: Cell, model: nn.Module, start: int = 0) -> Stream:
    """The cell's stream as its model wants it."""
    chosen = {"limit": cell.limit, "order": cell.order, "batch_size": cell.batch_size}
    options: dict[str, Any] = {k: v for k, v in chosen.items() if v is not None}
    options |= {"seed": cell.seed, "workers": cell.loaders, "start": start}
    options |= {"on_error": cell.on_error, "frost_folder": cell.frost_folder}
    if is_named(cell) and cell.data is None:
        _check_suits_embedded(cell, model)
        del options["on_error"], options["frost_folder"]  # its pictures are made, not read
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


def _check_suits_embedded(cell: Cell, model: nn.Module) -> None:
    side = embedded.SIZE
    try:
        check_preprocess(model, Preprocess(embedded.MEAN, embedded.STD, size=(side, side)))
    except ValueError as error:
        raise ValueError(
            f"{cell.model} was not made for the embedded benchmark ({side} x {side} pixels, mean "
            f"{embedded.MEAN[0]}, std {embedded.STD[0]}): use digits-vit or digits-convnext there, "
            "or name the folder of its own data with --data"
        ) from error


def preprocessing(cell: Cell, model: nn.Module) -> Preprocess:
    """What the model expects of its pictures: stated by the cell, else by the model."""
    if cell.normalise is None:
        if own_preprocess(model) is None:
            raise ValueError(
                f"{cell.model} does not say what pictures it expects: give --mean, --std (three "
                "numbers each, for pixels in 0..1) and --size"
            )
        return preprocess_for(model, cell.preprocess)
    mean, std = cell.normalise
    side = cell.size or 224
    return preprocess_for(model, Preprocess(mean=mean, std=std, size=(side, side)))


def describe_source(cell: Cell) -> dict[str, Any] | None:
    """Which clean images are at the methods' disposal: a fact of the protocol, needed or not."""
    if cell.source is not None:
        return {"images": cell.source_images, "from": f"folder {Path(cell.source).name}"}
    if not is_named(cell):
        return None
    origin = "ImageNet validation images"
    if cell.data is None:
        origin = "embedded training digits"
    elif cell.stream == "cifar10-c":
        origin = "CIFAR-10 training images"
    return {"images": cell.source_images, "from": origin}


def _drawn(domain: Domain, count: int, pre: Preprocess) -> list[Tensor]:
    """Some of a domain's pictures as the model takes them, the same ones every time."""
    stream = Stream([domain], seed=0, limit=min(count, len(domain)), **stream_options(pre))
    return [batch.images for batch in stream]
