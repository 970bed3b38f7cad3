"""Removes what processes that have ended left in the Docker daemon: containers, images and networks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agentgym.errors import SandboxError
from agentgym.tools.containers.daemon import Daemon, Found
from agentgym.tools.containers.owner import OWNER, has_ended, is_of_this_machine
from agentgym.tools.containers.python_image import IMAGE, IMAGE_LABEL, host_image_name

__all__ = ["Reaped", "reap"]


@dataclass(frozen=True, kw_only=True)
class Reaped:
    """What was removed, by name, and what was left alone."""

    containers: tuple[str, ...]
    images: tuple[str, ...]
    networks: tuple[str, ...]
    elsewhere: tuple[str, ...]
    """Whose owners are processes of another machine or PID namespace: only there can one tell whether they ended."""
    busy: tuple[str, ...]
    """Images that would go, if containers did not use them."""


def reap(daemon: Daemon) -> Reaped:
    """Removes what has an owner that has ended, and images of this machine's Python as it was before."""
    elsewhere: list[str] = []
    containers = list(_left(daemon.found("containers"), elsewhere))
    for one in containers:
        daemon.remove_container(one.id)
    networks = list(_left(daemon.found("networks"), elsewhere))
    for one in networks:
        daemon.remove_network(one.id)
    images = [*_left(daemon.found("images"), elsewhere), *_old_pythons(daemon)]
    gone = {one.id: daemon.remove_image(one.name) for one in images}
    return Reaped(
        containers=tuple(one.name for one in containers),
        images=tuple(one.name for one in images if gone[one.id]),
        networks=tuple(one.name for one in networks),
        elsewhere=tuple(elsewhere),
        busy=tuple(one.name for one in images if not gone[one.id]),
    )


def _left(found: list[Found], elsewhere: list[str]) -> Iterator[Found]:
    for one in found:
        if not is_of_this_machine(one.labels):
            elsewhere.append(one.name)
        elif has_ended(one.labels):
            yield one


def _old_pythons(daemon: Daemon) -> Iterator[Found]:
    try:
        current = host_image_name()
    except SandboxError:  # none can be made here: none is in use
        current = ""
    for one in daemon.found("images", IMAGE_LABEL):  # snapshots and images built from ours have its label too
        is_ours = OWNER not in one.labels and (one.name.startswith(f"{IMAGE}:") or one.name == one.id)
        if is_ours and one.name != current:
            yield one
