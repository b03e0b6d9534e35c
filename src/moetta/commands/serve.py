"""`moetta serve`: an adaptive classifier behind HTTP."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moetta import zoo
from moetta.api import adapt
from moetta.core.adapter import Adapter
from moetta.core.config import parse_overrides
from moetta.data.catalogue import SMALL_SETS
from moetta.data.preprocess import Preprocess, preprocess_for
from moetta.guard import Guard
from moetta.serve import Classifier, Settings, create_app, run
from moetta.serve.tenants import Answering
from moetta.zoo.by_name import load_model

TOKEN, KEYS = "MOETTA_ADMIN_TOKEN", "MOETTA_API_KEYS"


@dataclass(frozen=True)
class Serve:
    """Serve a classifier that keeps learning from the images it classifies.

    Without arguments it serves a small model of two-digit numbers on this machine only. Admin
    calls need a token: set the environment variable MOETTA_ADMIN_TOKEN, or give a file. Clients
    need a key if MOETTA_API_KEYS (separated by commas) or a file names some.
    """

    model: str = "digits-vit"
    """Shipped, a timm name with tag, module:function, or a Hugging Face folder."""
    weights: Path | None = None
    """Load the model's weights from this safetensors file."""
    labels: Path | None = None
    """Names of the classes, one per line; by default those that are known, else numbers."""
    method: str = "moetta"
    """How it learns; `moetta methods` lists the methods, and noadapt learns nothing."""
    preset: str | None = None
    """Where the method's configuration starts; by default what suits the model."""
    set: tuple[str, ...] = ()
    """Fields of the method's configuration, as in lr=1e-3 experts=11."""
    source: Path | None = None
    """For methods that need source images: what adapter.save_source() wrote."""
    guard: bool = True
    """Watch the adaptation, and undo it where it does harm."""
    mean: tuple[float, float, float] | None = None
    """Mean by channel, for a model that does not say what it expects."""
    std: tuple[float, float, float] | None = None
    """Standard deviation by channel, with --mean."""
    size: int = 224
    """Side of the images, with --mean."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, mps."""
    threads: int | None = None
    """CPU threads of the model; all by default."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine can reach the default."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which the service may be called, besides those of this machine."""
    admin_token_file: Path | None = None
    """File with the admin token."""
    api_keys_file: Path | None = None
    """File with the API keys, one per line."""

    max_batch: int = 64
    """Images in one forward pass."""
    max_wait_ms: float = 5.0
    """How long a batch waits for company."""
    learn_samples: int = 32
    """Images in one update; smaller batches are pooled."""
    learn_queue: int | None = None
    """With more images waiting than this, nothing is learnt; by default twice --max-batch, or half
    of --max-queue if that is less."""
    max_queue: int = 512
    """Images that may wait; beyond it requests are refused."""
    max_queue_per_tenant: int | None = None
    """Images of one stream that may wait; as many as of all by default."""
    queue_timeout: float = 5.0
    """Seconds that an image may wait."""
    max_body: int = 10_000_000
    """Bytes of a request's body."""
    max_pixels: int = 32_000_000
    """Pixels of an image."""
    max_images: int = 64
    """Images in a request."""
    body_timeout: float = 10.0
    """Seconds that a client has to send its body."""
    header_timeout: float = 10.0
    """Seconds that a client has to send its headers."""
    max_connections: int = 1000
    """Open connections."""

    tenants_in_memory: int = 16
    """Streams (X-Stream-Id) with their state in memory; the others wait on disk."""
    max_tenants: int = 1000
    """Streams that may exist."""
    state: Path = Path("moetta-state")
    """Folder of the snapshots, from which a restart continues."""
    snapshot_every: int = 100
    """Updates of a stream between two snapshots."""
    snapshots_kept: int = 3
    """Snapshots of a stream that are kept."""
    verbose: bool = False
    """Log more."""


def serve(options: Serve) -> None:
    """Serve until a signal says stop."""
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("moetta.serve").setLevel(logging.INFO)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    settings = make_settings(options)
    with only_one(options.state):
        classifier = make_classifier(options)
        app = create_app(classifier, lambda: make_adapter(options, classifier.model), settings)
        saved = run(app, settings, on_ready=lambda url: print(_welcome(options, url), flush=True))
    if saved:
        print("stopped; everything that was accepted is answered, and the state is saved")
    else:
        print("stopped, but not everything that was learnt could be saved", file=sys.stderr)
    sys.stdout.flush()
    # All is done; to take torch apart would cost another second, with a supervisor waiting.
    os._exit(0 if saved else 1)


def _welcome(options: Serve, url: str) -> str:
    return (
        f"moetta serves {options.model} with {options.method} at {url}\n"
        f"state in {options.state}; API at {url}/docs; stop with Ctrl-C"
    )


def make_settings(options: Serve) -> Settings:
    """The options that are the service's bounds, and the secrets."""
    token = os.environ.get(TOKEN)
    if options.admin_token_file is not None:
        token = options.admin_token_file.read_text().strip()
    keys = [key.strip() for key in os.environ.get(KEYS, "").split(",")]
    if options.api_keys_file is not None:
        keys += [line.strip() for line in options.api_keys_file.read_text().splitlines()]
    same = {
        name: getattr(options, name)
        for name in Settings.__dataclass_fields__
        if hasattr(options, name)
    }
    return Settings(**same, admin_token=token or None, api_keys=tuple(key for key in keys if key))


def make_classifier(options: Serve) -> Classifier:
    """The model with its preprocessing and labels."""
    weights = None if options.weights is None else str(options.weights)
    model = load_model(options.model, weights, options.device)
    given: Any = "model"
    if (options.mean is None) != (options.std is None):
        raise ValueError("give --mean and --std together")
    if options.mean is not None and options.std is not None:
        given = Preprocess(options.mean, options.std, (options.size, options.size))
    preprocess = preprocess_for(model, given)
    with torch.inference_mode():
        blank = torch.zeros(1, 3, *preprocess.size, device=options.device)
        output = model(blank)
    classes = int(getattr(output, "logits", output).shape[1])
    labels = default_labels(options.model, classes)
    if options.labels is not None:
        labels = tuple(options.labels.read_text().splitlines())
    return Classifier(
        options.model, model, preprocess.transform(), preprocess.mean, preprocess.std, labels
    )


def default_labels(name: str, classes: int) -> tuple[str, ...]:
    """Names for a model's classes: known ones where the model says what it knows, else numbers."""
    shipped = zoo.RECIPES.get(name)
    if shipped is not None and shipped.classes == classes:
        known = SMALL_SETS.get(shipped.data)
        return known.classes if known else tuple(f"{number:02d}" for number in range(classes))
    if classes == 1000:
        from timm.data.imagenet_info import ImageNetInfo

        info = ImageNetInfo("imagenet-1k")
        return tuple(info.index_to_description(index) for index in range(1000))
    return tuple(map(str, range(classes)))


def make_adapter(options: Serve, model: nn.Module) -> tuple[Answering, Adapter]:
    """What a new tenant starts with."""
    fields = zoo.tuned(options.model, options.method) if options.model in zoo.RECIPES else {}
    if options.preset is not None:
        fields = {}
    overrides = {} if options.method == "noadapt" else dict(parse_overrides(options.set))
    adapter = adapt(
        model,
        options.method,
        preset=options.preset or "paper",
        source=options.source,
        **{**fields, **overrides},
    )
    if not options.guard or not adapter.trained:
        return adapter, adapter
    return Guard(adapter), adapter


@contextmanager
def only_one(state: Path) -> Iterator[None]:
    """Keep a second service away from the same state.

    Raises:
        ValueError: there is one already.
    """
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"another service uses the state in {state}; give this one its own --state FOLDER"
            ) from None
        yield
