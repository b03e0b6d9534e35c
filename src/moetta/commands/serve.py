"""`moetta serve`: an adapting classifier over HTTP."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from moetta import zoo
from moetta.api import adapt
from moetta.commands.ray_option import HERE, RayAddress
from moetta.core.adapter import Adapter
from moetta.core.config import parse_overrides
from moetta.data.catalogue import SMALL_SETS
from moetta.data.preprocess import Preprocess, preprocess_for
from moetta.guard import Guard
from moetta.methods import find
from moetta.serve import Classifier, Settings, create_app, run
from moetta.serve.tenant import Answering, Build
from moetta.zoo.by_name import load_model

if TYPE_CHECKING:
    from moetta.serve.ray_cluster import Deployment

Policy = Literal["per-replica", "by-stream", "merged"]
POLICIES: tuple[str, ...] = get_args(Policy)
FOLDER = Path("moetta-state")
TOKEN, KEYS = "MOETTA_ADMIN_TOKEN", "MOETTA_API_KEYS"


@dataclass(frozen=True)
class Serve:
    """Serve a classifier that keeps learning from the images it classifies.

    Without arguments it serves a small model of two-digit numbers on this machine only. Admin
    calls need a token: set the environment variable MOETTA_ADMIN_TOKEN, or give a file. Clients
    need a key if MOETTA_API_KEYS (separated by commas) or a file names some.
    """

    model: str = "digits-vit"
    """A shipped model, a timm name with its tag, module:function, or a Hugging Face folder."""
    weights: Path | None = None
    """Load the model's weights from this safetensors file."""
    labels: Path | None = None
    """File of class names, one per line; by default the model's names if known, else numbers."""
    method: str = "moetta"
    """How it learns; `moetta methods` lists the methods; noadapt learns nothing."""
    preset: str | None = None
    """Preset of the method's configuration; by default what suits the model."""
    set: tuple[str, ...] = ()
    """Fields of the method's configuration, such as lr=1e-3 experts=11."""
    source: Path | None = None
    """For methods that need source images: what adapter.save_source() wrote."""
    guard: bool = True
    """Watch the adaptation, and undo it when it does harm."""
    mean: tuple[float, float, float] | None = None
    """Mean per channel, for a model that does not say what it expects."""
    std: tuple[float, float, float] | None = None
    """Standard deviation per channel, with --mean."""
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
    """Host names that clients may use, besides those of this machine."""
    admin_token_file: Path | None = None
    """File with the admin token."""
    api_keys_file: Path | None = None
    """File with the API keys, one per line."""

    max_batch: int = 64
    """Maximum number of images in one forward pass."""
    max_wait_ms: float = 5.0
    """How long a batch waits for more images."""
    learn_samples: int = 32
    """Images in one update; smaller batches are pooled."""
    learn_queue: int | None = None
    """With more images waiting than this, nothing is learnt; by default twice --max-batch, or half
    of --max-queue if that is less."""
    max_queue: int = 512
    """Maximum number of waiting images; further requests are refused."""
    max_queue_per_tenant: int | None = None
    """Maximum number of waiting images of one stream; by default the same as --max-queue."""
    queue_timeout: float = 5.0
    """Maximum wait of an image, in seconds."""
    max_body: int = 10_000_000
    """Maximum size of a request's body, in bytes."""
    max_pixels: int = 32_000_000
    """Maximum size of an image, in pixels."""
    max_images: int = 64
    """Maximum number of images in a request."""
    body_timeout: float = 10.0
    """Seconds that a client has to send its body."""
    header_timeout: float = 10.0
    """Seconds that a client has to send its headers."""
    max_connections: int = 1000
    """Maximum number of open connections."""

    tenants_in_memory: int = 16
    """Maximum number of streams (X-Stream-Id) in memory; the others are kept on disk."""
    max_tenants: int = 1000
    """Maximum number of streams."""
    state: Path = FOLDER
    """Folder of the snapshots, from which a restart continues. With --ray also what replicas share
    of what they learn: per-replica (nothing), by-stream (each stream has its replica) or merged
    (everything); the folder is then --state-folder."""
    state_folder: Path | None = None
    """The folder, where --state says what replicas share."""
    snapshot_every: int = 100
    """Updates of a stream between two snapshots."""
    snapshots_kept: int = 3
    """Snapshots to keep per stream."""
    verbose: bool = False
    """Log more."""

    ray: RayAddress = None
    """Serve from several replicas on Ray (extra: ray): started on this machine, or the cluster at
    auto or host:port."""
    replicas: int = 2
    """With --ray: how many replicas, or the fewest if --max-replicas is more."""
    max_replicas: int | None = None
    """With --ray: add replicas, up to this many, while requests queue."""
    replica_cpus: float = 1.0
    """With --ray: CPUs to reserve for a replica; with --device cuda it also gets a GPU."""
    max_queued: int | None = None
    """With --ray: requests that may wait for a replica; by default the same as --max-queue."""
    merge_every: int = 4
    """With --state merged: updates of a stream on one replica between two merges."""
    ray_name: str = "moetta"
    """With --ray: name of the application on the cluster."""

    @property
    def policy(self) -> Policy:
        """What replicas share."""
        found = str(self.state)
        return found if found in POLICIES else "per-replica"  # type: ignore[return-value]

    @property
    def folder(self) -> Path:
        """The folder of the snapshots.

        Raises:
            ValueError: --state and --state-folder do not go together.
        """
        if str(self.state) not in POLICIES:
            if self.state_folder is not None and self.state != FOLDER:
                raise ValueError("give the folder by --state or by --state-folder, not by both")
            return self.state_folder or self.state
        if self.ray is None:
            raise ValueError(
                f"--state {self.state} says what replicas share, and needs --ray; for a folder of "
                f"that name give --state-folder {self.state}"
            )
        return self.state_folder or FOLDER


def serve(options: Serve) -> None:
    """Serve until a signal stops it."""
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("moetta.serve").setLevel(logging.INFO)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    settings = make_settings(options)
    with only_one(options.folder):
        if options.ray is None:
            app = create_app(*make_parts(options), settings)
            saved = run(app, settings, on_ready=lambda url: _greet(options, url))
        else:
            saved = _serve_on_ray(options, settings)
    if saved:
        print("stopped; every accepted request was answered, and the state is saved")
    else:
        print("stopped, but not everything that was learnt could be saved", file=sys.stderr)
    sys.stdout.flush()
    # All is done; tearing torch down would keep a supervisor waiting another second.
    os._exit(0 if saved else 1)


def _serve_on_ray(options: Serve, settings: Settings) -> bool:
    from moetta.serve.ray_front import create_front

    deployment = make_deployment(options, settings)
    try:
        deployment.connect()
        app = create_front(settings, options.policy, deployment.start, deployment.stop)
        return run(app, settings, on_ready=lambda url: _greet(options, url))
    finally:
        deployment.stop()


def make_deployment(options: Serve, settings: Settings) -> Deployment:
    """The service on Ray, checked as far as that is possible before Ray is there.

    Raises:
        ValueError: the options contradict each other, or the method cannot be merged.
    """
    from moetta.serve.merge import why_not
    from moetta.serve.ray_cluster import Cluster, Deployment
    from moetta.serve.ray_replica import Plan

    if options.merge_every < 1:
        raise ValueError(f"merge_every must be at least 1, got {options.merge_every}")
    cluster = Cluster(
        address=None if options.ray == HERE else options.ray,
        replicas=options.replicas,
        max_replicas=options.max_replicas,
        max_queued=settings.max_queue if options.max_queued is None else options.max_queued,
        cpus=options.replica_cpus,
        gpus=1.0 if options.device.startswith("cuda") else 0.0,
    )
    # Replicas work in folders of their own.
    paths: dict[str, Any] = {
        name: None if getattr(options, name) is None else getattr(options, name).absolute()
        for name in ("weights", "labels", "source")
    }
    there = replace(options, **paths)
    settings = replace(settings, state=options.folder.absolute())
    plan = Plan(
        options.ray_name,
        options.policy,
        options.merge_every,
        settings,
        partial(make_parts, there),
        options.verbose,
    )
    deployment = Deployment(cluster, plan)
    # A model that cannot be loaded or adapted is found here, with its own message.
    _, build = make_parts(replace(there, device="cpu"))
    _, adapter = build()
    reason = why_not(adapter)
    if options.policy == "merged" and reason is not None:
        raise ValueError(
            f"{options.method} cannot be merged: {reason}; use --state per-replica or by-stream"
        )
    return deployment


def make_parts(options: Serve) -> tuple[Classifier, Build]:
    """What is served, and how a new tenant's adapter is made."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    classifier = make_classifier(options)
    return classifier, lambda: make_adapter(options, classifier.model)


def _greet(options: Serve, url: str) -> None:
    print(_welcome(options, url), flush=True)


def _welcome(options: Serve, url: str) -> str:
    where = ""
    if options.ray is not None:
        most = f" to {options.max_replicas}" if options.max_replicas else ""
        where = f" from {options.replicas}{most} replicas ({options.policy})"
    return (
        f"moetta serves {options.model} with {options.method}{where} at {url}\n"
        f"state in {options.folder}; API at {url}/docs; stop with Ctrl-C"
    )


def make_settings(options: Serve) -> Settings:
    """The service's limits and secrets, from the options."""
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
    same["state"] = options.folder
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
    """Names of a model's classes if they are known, else numbers."""
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
    method = find(options.method)
    config = method.config.preset(options.preset or "paper", **{**fields, **overrides})
    if options.mean is not None and options.std is not None:
        config = config.with_pixels(options.mean, options.std)
    if config.needs_source and options.source is None:
        raise ValueError(
            f"{options.method} needs source images, of which a server has none: make the adapter "
            "once in Python with source=images, write what it computed with "
            "adapter.save_source(FILE), and start with --source FILE"
            f"{method.adapter.without_source}"
        )
    adapter = adapt(model, config, source=options.source)
    if not options.guard or options.method == "noadapt":
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
                f"another service uses the state in {state}; give this one another --state FOLDER"
            ) from None
        yield
