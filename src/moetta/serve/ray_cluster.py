"""Ray itself: connect, check, deploy, and leave the cluster as it was found."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetta import __version__, ray_connect
from moetta.serve.ray_keeper import Keeper
from moetta.serve.ray_replica import NAMESPACE, Plan, Replica

if TYPE_CHECKING:
    from moetta.serve.ray_front import Front

log = logging.getLogger("moetta.serve")


@dataclass(frozen=True)
class Cluster:
    """Where replicas run, and how many.

    Attributes:
        address: the cluster's; None starts a Ray on this machine, for as long as the service runs.
        replicas: how many, or the fewest if max_replicas is more.
        max_replicas: add replicas while the queues are long, up to this many.
        max_queued: requests that may wait for a replica.
        cpus: CPUs reserved for a replica.
        gpus: GPUs reserved for a replica.
        start_timeout: seconds in which all replicas must be ready.
    """

    address: str | None = None
    replicas: int = 2
    max_replicas: int | None = None
    max_queued: int = 512
    cpus: float = 1.0
    gpus: float = 0.0
    start_timeout: float = 300.0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas must be at least replicas={self.replicas}, got {self.max_replicas}"
            )
        if self.max_queued < 1:
            raise ValueError(f"max_queued must be at least 1, got {self.max_queued}")

    @property
    def most(self) -> int:
        """The most replicas that may run."""
        return self.max_replicas or self.replicas


class Deployment:
    """The service on a cluster, from connecting to leaving.

    Args:
        cluster: where.
        plan: what.
    """

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        if plan.policy == "by-stream" and cluster.most > cluster.replicas:
            raise ValueError(
                "--state by-stream needs a fixed number of replicas, or streams would move between "
                "them; leave --max-replicas out"
            )
        self.cluster = cluster
        self.plan = plan
        self._apps: list[str] = []
        self._keeper: Any = None
        self._served_before = True

    # --- connecting -----------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect, or start Ray here, and refuse a cluster whose nodes have another moetta.

        Raises:
            ValueError: Ray is not installed, or that is not a cluster to work with.
            ConnectionError: no cluster answers.
        """
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
        address = self.cluster.address
        if address is not None and address.startswith("ray://"):
            raise ValueError(
                f"{address} is a Ray client address, through which a service cannot run; start "
                "moetta on a node of the cluster and give its address, such as 10.0.0.1:6379"
            )
        here = {
            "num_cpus": max(os.cpu_count() or 1, int(self.cluster.most * self.cluster.cpus) + 1),
            "_node_ip_address": "127.0.0.1",
            # Its exporter listens on every address, and /metrics has what matters.
            "_system_config": {"enable_metrics_collection": False},
        }
        ray_connect.connect(address, here=here, namespace=NAMESPACE, log_to_driver=True)
        if address is not None:
            nodes = ray_connect.live_nodes()
            ray_connect.refuse(ray_connect.examine_nodes(nodes, __version__), nodes)

    # --- deploying ------------------------------------------------------------------------------

    def start(self, front: Front) -> tuple[list[Any], Any]:
        """Start keeper and replicas, and wait until they are ready.

        Raises:
            ValueError: the name is taken, or replicas could not start.
        """
        import ray
        from ray import serve
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        plan, cluster = self.plan, self.cluster
        self._served_before = _serve_runs()
        serve.start(proxy_location="Disabled")  # a Serve that runs already stays as it is
        self._make_way()
        settings = plan.settings
        here = ray.get_runtime_context().get_node_id()
        # On this machine, where the state folder is.
        self._keeper = (
            ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(Keeper)
            .options(
                name=plan.keeper,
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            )
            .remote(
                plan.name,
                settings.state,
                settings.snapshots_kept,
                settings.snapshot_every,
                plan.verbose,
            )
        )
        options = self._options()
        if plan.policy == "by-stream":
            shards = [
                serve.deployment(name="replica", num_replicas=1, **options)(Replica).bind(plan, n)
                for n in range(cluster.replicas)
            ]
            apps = {f"{plan.name}-{n}": shard for n, shard in enumerate(shards)}
        else:
            scaling: dict[str, Any] = {"num_replicas": cluster.replicas}
            if cluster.most > cluster.replicas:
                scaling = {
                    "autoscaling_config": {
                        "min_replicas": cluster.replicas,
                        "initial_replicas": cluster.replicas,
                        "max_replicas": cluster.most,
                        # One batch at work and one that waits is as much as a replica wants.
                        "target_ongoing_requests": 2 * settings.max_batch,
                        "upscale_delay_s": 5.0,
                        "downscale_delay_s": 300.0,
                    }
                }
            deployment = serve.deployment(name="replica", **options, **scaling)(Replica)
            apps = {plan.name: deployment.bind(plan)}
        self._apps = list(apps)
        serve.run_many(
            [serve.RunTarget(app, name=name, route_prefix=None) for name, app in apps.items()],
            wait_for_ingress_deployment_creation=True,
            wait_for_applications_running=False,
        )
        self._wait(front)
        return [serve.get_app_handle(name) for name in self._apps], self._keeper

    def _options(self) -> dict[str, Any]:
        settings = self.plan.settings
        actor: dict[str, Any] = {"num_cpus": self.cluster.cpus}
        if self.cluster.gpus:
            actor["num_gpus"] = self.cluster.gpus
        return {
            "ray_actor_options": actor,
            # As many as its own queue takes, so that a replica decides under what pressure it
            # stops learning; what is beyond waits here, and beyond that is refused.
            "max_ongoing_requests": settings.max_queue,
            "max_queued_requests": self.cluster.max_queued,
            "health_check_period_s": 5.0,
            "health_check_timeout_s": 10.0,
            "graceful_shutdown_timeout_s": settings.queue_timeout + 20.0,
            "user_config": {"start": True},
        }

    def _make_way(self) -> None:
        """Remove what a service that was killed left on the cluster.

        Raises:
            ValueError: such a service still runs.
        """
        import ray
        from ray import serve

        name = self.plan.name
        names = [app for app in serve.status().applications if _ours(app, name)]
        try:
            ray.get_actor(self.plan.keeper, namespace=NAMESPACE)
        except ValueError:
            for app in names:
                log.warning("removing %s, whose service was killed", app)
                serve.delete(app)
            return
        raise ValueError(
            f"a service named {name!r} already runs on this cluster; give this one another "
            "--ray-name"
        )

    def _wait(self, front: Front) -> None:
        from ray import serve

        give_up = time.monotonic() + self.cluster.start_timeout
        while True:
            found = serve.status().applications
            states = [found[name].status.value for name in self._apps if name in found]
            if len(states) == len(self._apps) and all(s == "RUNNING" for s in states):
                return
            messages = [
                deployment.message.strip()
                for name in self._apps
                if name in found
                for deployment in found[name].deployments.values()
                if deployment.message
            ]
            if "DEPLOY_FAILED" in states:
                raise ValueError(f"the replicas could not start: {_last('; '.join(messages))}")
            if front.draining:
                raise ValueError("stopped while the replicas were starting")
            if time.monotonic() > give_up:
                raise ValueError(
                    f"the replicas were not ready within {self.cluster.start_timeout:g} s "
                    f"({_last('; '.join(messages)) or ', '.join(states)}); has the cluster "
                    f"{self.cluster.replicas * self.cluster.cpus:g} free CPUs for them?"
                )
            time.sleep(0.5)

    # --- leaving --------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the replicas, and Ray if it was started here."""
        import ray
        from ray import serve

        if not ray.is_initialized():
            return
        if self.cluster.address is not None:
            for name in self._apps:
                try:
                    _within(60, lambda name=name: serve.delete(name))  # type: ignore[misc]
                except Exception as error:
                    log.error("application %s could not be removed: %s", name, _short(error))
            if self._keeper is not None:
                ray.kill(self._keeper)
            if not self._served_before and self._apps and not serve.status().applications:
                serve.shutdown()  # type: ignore[no-untyped-call]
        self._apps = []
        ray.shutdown()


def _ours(app: str, name: str) -> bool:
    rest = app.removeprefix(f"{name}-")
    return app == name or (rest != app and rest.isdecimal())


def _serve_runs() -> bool:
    """Whether someone has started Ray Serve on the cluster."""
    from ray.util import list_named_actors

    actors = list_named_actors(all_namespaces=True)
    return any(actor["namespace"] == "serve" for actor in actors)


def _within(seconds: float, function: Callable[[], object]) -> None:
    """Call a function in a thread, since it may hang for ever.

    Raises:
        TimeoutError: it did.
    """
    errors: list[BaseException | None] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)
        else:
            errors.append(None)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if not errors:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if errors[0] is not None:
        raise errors[0]


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


def _last(message: str) -> str:
    """The last line that says something: of a traceback, the error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
