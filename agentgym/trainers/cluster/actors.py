"""A wrapper around Ray: the cluster of a run, its actors and their errors. No other module imports `ray`."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, ObjectLostError, OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from agentgym.errors import AgentGymError, EngineError
from agentgym.tools.sandbox.service_settings import variables_of_run
from agentgym.trainers.cluster.address import check_answers, token_hint
from agentgym.trainers.settings.cluster import ClusterConfig, Role

__all__ = [
    "Actor",
    "ActorFailed",
    "ActorLost",
    "Cluster",
    "Parcel",
    "ParcelLost",
    "call_all",
    "own_address",
    "own_node",
    "restore_path",
    "was_restarted",
]

_log = logging.getLogger(__name__)
FAREWELL_S = 10.0
"""The seconds after an actor's failure within which the death of another actor is reported as its cause."""
TOKENS = "ray._private.authentication.authentication_token_setup"
_PATH = "AGENTGYM_PYTHONPATH"
A = TypeVar("A", covariant=True)
K = TypeVar("K")
P = ParamSpec("P")
R = TypeVar("R")


class ActorLost(EngineError):
    """An actor's process died or cannot be reached, so the call is lost."""


class ActorFailed(AgentGymError, RuntimeError):
    """Code in an actor raised an exception that is not an AgentGymError; the message contains its traceback."""


class ParcelLost(EngineError):
    """The process that stored an object died, so the object is lost."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """An object in the cluster's object store, sent once however many processes fetch it."""

    ref: Any
    """Ray's reference."""

    @classmethod
    def of(cls, content: object) -> Parcel:
        """Stores `content`; its tensors are kept once per node."""
        return cls(ray.put(content))

    async def open(self) -> Any:
        """Returns the stored object; raises ParcelLost if the process that stored it is gone."""
        with _parcel_errors():
            return await self.ref

    def take(self) -> Any:
        """Returns the stored object as `open` does, and blocks meanwhile."""
        with _parcel_errors():
            return ray.get(self.ref)


@contextmanager
def _parcel_errors() -> Iterator[None]:
    try:
        yield
    except ObjectLostError as error:
        raise ParcelLost("the process that stored the weights is gone, and they with it") from error


@dataclass(frozen=True, eq=False)
class Actor(Generic[A]):
    """An actor of the run, an object of the class `A` in a process of its own; it may be passed to other actors.

    Methods are those of the class, with their arguments: `await actor.call(Board.post, posted)`.
    """

    label: str
    """The actor's name in messages, such as `engine 1`."""
    name: str
    """The actor's name in the cluster."""
    handle: ActorHandle[Any]

    @staticmethod
    def find(label: str, name: str) -> Actor[Any]:
        """Returns the actor with that name in the cluster."""
        return Actor(label, name, ray.get_actor(name))

    def __reduce__(self) -> tuple[object, ...]:
        # By name: a reference to a handle would be in the object store, where a restarted actor does not find it.
        return Actor.find, (self.label, self.name)

    async def call(self, method: Callable[Concatenate[A, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns the method's result.

        Raises ActorLost if the actor's process is gone, an AgentGymError as it was raised, and ActorFailed with the
        traceback for anything else. Cancelling cancels the method.
        """
        ref = getattr(self.handle, method.__name__).remote(*args, **kwargs)
        with self.errors():
            try:
                result: R = await ref
                return result
            except asyncio.CancelledError:
                with suppress(TypeError):  # the cluster is gone, and the call with it
                    ray.cancel(ref)
                raise

    def tell(self, method: Callable[Concatenate[A, P], object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls the method without waiting for its result."""
        getattr(self.handle, method.__name__).remote(*args, **kwargs)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Converts Ray's exceptions to those that `call` documents."""
        try:
            yield
        except RayActorError as error:
            if error.actor_init_failed:
                raise ActorFailed(f"{self.label} cannot begin: {error}") from None
            raise ActorLost(f"{self.label} is gone: its process died, or its node cannot be reached") from error
        except OutOfMemoryError as error:
            raise ActorLost(f"{self.label} is gone: {_shortage(error)}") from error
        except RayTaskError as error:
            raise self._cause_of(error) from None

    def _cause_of(self, error: RayTaskError) -> BaseException:
        cause = error.cause
        if isinstance(cause, AgentGymError):
            cause.add_note(f"raised in {self.label}")
            return cause
        return ActorFailed(f"{self.label} raised {type(cause).__name__}: {cause}\n{error}")  # its text is the traceback

    def kill(self) -> None:
        """Ends the actor's process without a restart."""
        ray.kill(self.handle, no_restart=True)


def call_all(
    actors: Sequence[Actor[A]], method: Callable[Concatenate[A, P], R], *arguments: P.args, **kwargs: P.kwargs
) -> list[R]:
    """Calls the method on all actors at once, blocks, and returns each actor's result.

    The first failure ends the wait for the others; it is raised as by `Actor.call`. A failure that is not an
    AgentGymError may be the effect of another actor's death (a broken connection). If such a death shows soon after,
    it is raised instead.
    """
    shared = [ray.put(argument) for argument in arguments]
    shared_kwargs = {name: ray.put(argument) for name, argument in kwargs.items()}
    actors_by_ref = {getattr(actor.handle, method.__name__).remote(*shared, **shared_kwargs): actor for actor in actors}
    waiting, results = list(actors_by_ref), {}
    while waiting:
        (done,), waiting = ray.wait(waiting, num_returns=1)
        try:
            with actors_by_ref[done].errors():
                results[done] = ray.get(done)
        except ActorFailed:
            _raise_deaths({ref: actors_by_ref[ref] for ref in waiting})
            raise
    return [results[ref] for ref in actors_by_ref]


def _raise_deaths(actors_by_ref: Mapping[Any, Actor[Any]]) -> None:
    """Raises ActorLost if one of the actors dies within FAREWELL_S."""
    waiting, ends = list(actors_by_ref), time.monotonic() + FAREWELL_S
    while waiting and time.monotonic() < ends:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=ends - time.monotonic())
        for ref in done:
            try:
                ray.get(ref)
            except RayActorError as error:
                raise ActorLost(f"{actors_by_ref[ref].label} is gone: its process died") from error
            except OutOfMemoryError as error:
                raise ActorLost(f"{actors_by_ref[ref].label} is gone: {_shortage(error)}") from error
            except RayTaskError:
                continue


def _shortage(error: RayError) -> str:
    match = re.search(r"was (\S+) used / (\S+) limit", str(error))
    used = f" ({match[1]} of {match[2]} used)" if match else ""
    return f"Ray ended it, because its node was low on memory{used}: have fewer actors there, or fewer other processes"


def was_restarted() -> bool:
    """True if this actor's process replaces one that died."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def restore_path() -> None:
    """Restores the command's PYTHONPATH for the processes that this actor starts.

    The actor's own PYTHONPATH contains all that the command could import. An interpreter of another environment would
    import that too.
    """
    if _PATH in os.environ:
        os.environ["PYTHONPATH"] = os.environ[_PATH]


def own_node() -> str:
    """Returns the name of this process's node in the cluster."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


def own_address() -> str:
    """Returns the address at which other nodes of the cluster reach this process's node."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


class Cluster:
    """Joins or starts a Ray cluster, reserves the resources of the run's actors, and releases them at the end."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self._actors: list[Actor[Any]] = []
        self._group: PlacementGroup | None = None
        self._was_connected = ray.is_initialized()
        self.cores: int | None = None
        """The cores of this machine if the cluster is local and ends with the run, otherwise None."""
        self.run = secrets.token_hex(4)
        """The name of the run in the cluster."""

    def __enter__(self) -> Cluster:
        config = self.config
        if not self._was_connected:
            self._connect(config.address or os.environ.get("RAY_ADDRESS"))
        try:
            self._reserve()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._leave()

    def actor(
        self, role: Role, number: int, kind: type[K], *arguments: object, max_concurrency: int = 1000
    ) -> Actor[K]:
        """Starts an actor of the class `kind` on its reserved bundle, with its label followed by the arguments."""
        label, place, needs = f"{role} {number}", self.config.place(role, number), self.config.needs(role)
        assert self._group is not None
        return self._begin(
            label,
            kind,
            (label, *arguments),
            num_cpus=needs.get("CPU", 0),
            num_gpus=needs.get("GPU", 0),
            max_restarts=self.config.max_restarts,
            max_task_retries=0,
            max_concurrency=max_concurrency,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place),
        )

    def post(
        self, label: str, kind: type[K], *arguments: object, is_here: bool = False, max_concurrency: int = 1000
    ) -> Actor[K]:
        """Starts an actor that takes no resources, on the node of this process if it `is_here`."""
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": self.config.max_restarts}
        if is_here:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(own_node(), soft=False)
        return self._begin(label, kind, arguments, max_concurrency=max_concurrency, max_task_retries=0, **options)

    @property
    def has_other_nodes(self) -> bool:
        """True if an actor is on another node than this process."""
        table: Mapping[str, Any] = ray.util.placement_group_table(self._group)
        return set(table["bundles_to_node_id"].values()) != {own_node()}

    def _begin(self, label: str, kind: type[K], arguments: Sequence[object], **options: Any) -> Actor[K]:
        name = f"agentgym-{self.run}-{label.replace(' ', '-')}"
        remote: Any = ray.remote(kind)
        actor: Actor[K] = Actor(label, name, remote.options(name=name, **options).remote(*arguments))
        self._actors.append(actor)
        return actor

    def nodes(self) -> list[str]:
        """Returns the address of each reserved bundle's node, in the order of `ClusterConfig.bundles`."""
        table = ray.util.placement_group_table(self._group)
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
        ids: Mapping[int, str] = table["bundles_to_node_id"]
        return [f"{address.get(ids[place], '?')} ({ids[place][:6]})" for place in sorted(ids)]

    def _connect(self, address: str | None) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        logging.getLogger(TOKENS).addFilter(_is_no_default)
        self.cores = None if address else os.cpu_count() or 1
        if address:
            check_answers(address)
        # Actors import what this process can import: environments and rewards next to the command, a checkout.
        path = os.pathsep.join(dict.fromkeys([os.getcwd(), *sys.path[1:]]))
        paths = {"PYTHONPATH": path, _PATH: os.environ.get("PYTHONPATH", "")}
        try:
            with _sigterm_kept():
                ray.init(
                    address=address or "local",  # without a name Ray joins whatever runs on this machine
                    num_cpus=max(self.cores, self._num_cpus()) if self.cores else None,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                    runtime_env={"env_vars": {**paths, **variables_of_run()}},
                )
        except Exception as error:  # Ray itself raises a plain Exception if a node does not start in time
            where = f"join the Ray cluster at {address!r}" if address else "begin a Ray cluster on this machine"
            raise EngineError(f"cannot {where}: {_first_line(error)}; {token_hint(address)}see `ray status`") from error

    def _num_cpus(self) -> int:
        return int(sum(bundle.get("CPU", 0) for bundle in self.config.bundles)) + 1

    def _reserve(self) -> None:
        bundles = [bundle or {"CPU": 0.001} for bundle in self.config.bundles]
        num_gpus = sum(bundle.get("GPU", 0) for bundle in bundles)
        if self.cores and num_gpus > (there := _resources().get("GPU", 0)):  # no node will come
            raise EngineError(
                f"the run asks for {num_gpus:g} GPUs, and Ray finds {there:g} on this machine: ask for less"
                " (--ray.gpus-per-learner, --ray.gpus-per-engine), or join a cluster with --ray.address"
            )
        self._group = placement_group(bundles, strategy=self.config.placement)
        try:
            ray.get(self._group.ready(), timeout=self.config.start_s)
        except GetTimeoutError as error:
            resources = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU")}
            raise EngineError(
                f"the cluster did not give {resources} in {len(bundles)} bundles ({self.config.placement}) within"
                f" {self.config.start_s:g} s; it has {_resources()}: ask for less (--ray.*), or add nodes"
            ) from error

    def _leave(self) -> None:
        for actor in self._actors:
            actor.kill()
        self._actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if not self._was_connected and ray.is_initialized():
            ray.shutdown()


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restores the program's own SIGTERM handler, which Ray replaces in a driver."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _is_no_default(record: logging.LogRecord) -> bool:
    """False for Ray's warning in every run that it asks for a token, which is its default."""
    return not record.getMessage().startswith("Token authentication is enabled")


def _resources() -> dict[str, float]:
    resources: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return {name: number for name, number in resources.items() if name in ("CPU", "GPU")}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
