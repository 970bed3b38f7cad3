"""Ray, wrapped: the cluster of a run, its actors, and what becomes of their errors. Nothing else imports `ray`."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentgym.errors import AgentGymError, EngineError
from agentgym.trainers.settings.cluster import ClusterConfig, Role

__all__ = [
    "Actor",
    "ActorFailed",
    "ActorLost",
    "Cluster",
    "Parcel",
    "own_address",
    "restore_path",
    "together",
    "was_begun_anew",
]

_log = logging.getLogger(__name__)
FAREWELL_S = 10.0
"""Seconds after the failure of one of several actors in which the death of another is taken for its cause."""
ANSWER_S = 20.0
"""Seconds that a cluster has to take a connection."""
TOKENS = "ray._private.authentication.authentication_token_setup"
_PATH = "AGENTGYM_PYTHONPATH"


class ActorLost(EngineError):
    """An actor's process died, or cannot be reached, and so did what it was asked for."""


class ActorFailed(AgentGymError, RuntimeError):
    """Code in an actor raised what is no error of ours; its traceback is in the message."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """Something in the cluster's object store, sent once however many fetch it."""

    ref: Any
    """Ray's reference."""

    @classmethod
    def of(cls, content: object) -> Parcel:
        """Stores `content`; tensors in it are kept once for each node."""
        return cls(ray.put(content))

    async def open(self) -> Any:
        """What was stored."""
        return await self.ref


@dataclass(frozen=True, eq=False)
class Actor:
    """An actor of the run, which may be passed on to others."""

    label: str
    """Its name in messages, such as `engine 1`."""
    name: str
    """Its name in the cluster."""
    handle: ActorHandle[Any]

    @staticmethod
    def find(label: str, name: str) -> Actor:
        """The actor of that name in the cluster."""
        return Actor(label, name, ray.get_actor(name))

    def __reduce__(self) -> tuple[object, ...]:
        # By name: a reference to a handle would lie in the object store, where an actor that is begun anew finds none.
        return Actor.find, (self.label, self.name)

    async def call(self, method: str, *arguments: object) -> Any:
        """What the method gives. Raises ActorLost when the actor's process is gone, an error of ours as it was raised,
        and ActorFailed with the traceback for anything else. Cancelling cancels the method."""
        ref = getattr(self.handle, method).remote(*arguments)
        with self.errors():
            try:
                return await ref
            except asyncio.CancelledError:
                with suppress(TypeError):  # the cluster is gone, and the call with it
                    ray.cancel(ref)
                raise

    def tell(self, method: str, *arguments: object) -> None:
        """Has the method called and waits for nothing."""
        getattr(self.handle, method).remote(*arguments)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns what Ray raises into what `call` promises."""
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
        """Ends its process for good."""
        ray.kill(self.handle, no_restart=True)


def together(actors: Sequence[Actor], method: str, *arguments: object) -> list[Any]:
    """What the method gives on each actor, when all of them do it at once; blocks. The first one that fails ends the
    wait for the others: raises as `Actor.call` does. Where that is no error of ours it may be another one's death as it
    is felt from outside (a broken connection), so a death that shows soon after is raised instead."""
    shared = [ray.put(one) for one in arguments]
    asked = {getattr(one.handle, method).remote(*shared): one for one in actors}
    waiting, found = list(asked), {}
    while waiting:
        (done,), waiting = ray.wait(waiting, num_returns=1)
        try:
            with asked[done].errors():
                found[done] = ray.get(done)
        except ActorFailed:
            _raise_deaths({ref: asked[ref] for ref in waiting})
            raise
    return [found[ref] for ref in asked]


def _raise_deaths(asked: Mapping[Any, Actor]) -> None:
    """Raises ActorLost where one of the actors dies within a while."""
    waiting, ends = list(asked), time.monotonic() + FAREWELL_S
    while waiting and time.monotonic() < ends:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=ends - time.monotonic())
        for ref in done:
            try:
                ray.get(ref)
            except RayActorError as error:
                raise ActorLost(f"{asked[ref].label} is gone: its process died") from error
            except OutOfMemoryError as error:
                raise ActorLost(f"{asked[ref].label} is gone: {_shortage(error)}") from error
            except RayTaskError:
                continue


def _shortage(error: RayError) -> str:
    found = re.search(r"was (\S+) used / (\S+) limit", str(error))
    used = f" ({found[1]} of {found[2]} used)" if found else ""
    return f"Ray ended it, because its node was low on memory{used}: have fewer actors there, or less beside them"


def was_begun_anew() -> bool:
    """Whether this actor's process takes the place of one that died."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def restore_path() -> None:
    """Gives the processes that this actor starts the PYTHONPATH of the command: the actor's own holds all that the
    command could import, and an interpreter of another environment would import it too."""
    if _PATH in os.environ:
        os.environ["PYTHONPATH"] = os.environ[_PATH]


def own_address() -> str:
    """The address of this process's node, as others of the cluster reach it."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


class Cluster:
    """Joins a Ray cluster or begins one, reserves what the run's actors need, and gives it all back at the end."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self._actors: list[Actor] = []
        self._group: PlacementGroup | None = None
        self._was_connected = ray.is_initialized()
        self.cores: int | None = None
        """Of this machine, where the cluster is on it alone and ends with the run."""
        self._run = secrets.token_hex(4)

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

    def actor(self, role: Role, number: int, kind: type, *arguments: object, max_concurrency: int = 1000) -> Actor:
        """Begins an actor of the class `kind` on its reserved bundle; it is given its label, then the arguments."""
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

    def post(self, label: str, kind: type, *arguments: object) -> Actor:
        """Begins an actor that takes no resources."""
        options = {"num_cpus": 0, "max_concurrency": 1000, "max_restarts": self.config.max_restarts}
        return self._begin(label, kind, arguments, max_task_retries=0, **options)

    def _begin(self, label: str, kind: type, arguments: Sequence[object], **options: Any) -> Actor:
        name = f"agentgym-{self._run}-{label.replace(' ', '-')}"
        remote: Any = ray.remote(kind)
        made = Actor(label, name, remote.options(name=name, **options).remote(*arguments))
        self._actors.append(made)
        return made

    def nodes(self) -> list[str]:
        """The node of each reserved bundle, by its address, in the order of `ClusterConfig.bundles`."""
        table = ray.util.placement_group_table(self._group)
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
        ids: Mapping[int, str] = table["bundles_to_node_id"]
        return [f"{address.get(ids[place], '?')} ({ids[place][:6]})" for place in sorted(ids)]

    def _connect(self, address: str | None) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        logging.getLogger(TOKENS).addFilter(_is_no_default)
        self.cores = None if address else os.cpu_count() or 1
        if address:
            _check_answers(address)
        # Actors find what this process finds: environments and rewards beside the command, a checkout.
        path = os.pathsep.join(dict.fromkeys([os.getcwd(), *sys.path[1:]]))
        try:
            with _sigterm_kept():
                ray.init(
                    address=address or "local",  # without a name Ray joins whatever runs on this machine
                    num_cpus=max(self.cores, self._num_cpus()) if self.cores else None,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                    runtime_env={"env_vars": {"PYTHONPATH": path, _PATH: os.environ.get("PYTHONPATH", "")}},
                )
        except Exception as error:  # Ray raises this itself where a node does not start in time
            where = f"join the Ray cluster at {address!r}" if address else "begin a Ray cluster on this machine"
            raise EngineError(f"cannot {where}: {_first_line(error)}; {_way_in(address)}see `ray status`") from error

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
            wanted = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU")}
            raise EngineError(
                f"the cluster did not give {wanted} in {len(bundles)} bundles ({self.config.placement}) within"
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
    """Keeps the program's own handler of SIGTERM, which Ray replaces in a driver."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _is_no_default(record: logging.LogRecord) -> bool:
    """False for what Ray warns of in every run: that it asks for a token, which is its default."""
    return not record.getMessage().startswith("Token authentication is enabled")


def _check_answers(address: str) -> None:
    """Raises EngineError where nobody listens at `HOST:PORT`: Ray would try for many minutes."""
    named = re.fullmatch(r"([^:/]+):(\d+)", address)
    if named is None:  # `auto`, or a form that Ray knows
        return
    try:
        socket.create_connection((named[1], int(named[2])), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise EngineError(f"cannot join the Ray cluster at {address!r}: nobody answers there ({error})") from error


def _way_in(address: str | None) -> str:
    """What opens a cluster that asks for a token: Ray gives its own to none that is named by its address."""
    if address in (None, "auto") or os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        return ""
    return "where it asks for a token (`ray start` does once there is a ~/.ray/auth_token), set RAY_AUTH_MODE=token; "


def _resources() -> dict[str, float]:
    found: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return {name: number for name, number in found.items() if name in ("CPU", "GPU")}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
