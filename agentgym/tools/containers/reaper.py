"""Removes containers, images and networks that ended processes have left in the Docker daemon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agentgym.errors import SandboxError
from agentgym.tools.containers.daemon import Daemon, Found
from agentgym.tools.containers.owner import OWNER, has_ended, is_of_this_machine
from agentgym.tools.containers.python_image import IMAGE, IMAGE_LABEL, host_image_name

__all__ = ["Reaped", "reap_resources"]


@dataclass(frozen=True, kw_only=True)
class Reaped:
    """The names of the resources that were removed, and of those that were left alone."""

    containers: tuple[str, ...]
    images: tuple[str, ...]
    networks: tuple[str, ...]
    elsewhere: tuple[str, ...]
    """Those owned by processes of another machine or PID namespace: only there is it known whether they ended."""
    busy: tuple[str, ...]
    """The images that would be removed if containers did not use them."""


def reap_resources(daemon: Daemon) -> Reaped:
    """Removes the resources of owners that have ended, and images of this machine's former Python."""
    elsewhere: list[str] = []
    containers = list(_orphans(daemon.find_labelled("containers"), elsewhere))
    for container in containers:
        daemon.remove_container(container.id)
    networks = list(_orphans(daemon.find_labelled("networks"), elsewhere))
    for network in networks:
        daemon.remove_network(network.id)
    images = [*_orphans(daemon.find_labelled("images"), elsewhere), *_old_pythons(daemon)]
    gone = {image.id: daemon.remove_image(image.name) for image in images}
    return Reaped(
        containers=tuple(container.name for container in containers),
        images=tuple(image.name for image in images if gone[image.id]),
        networks=tuple(network.name for network in networks),
        elsewhere=tuple(elsewhere),
        busy=tuple(image.name for image in images if not gone[image.id]),
    )


def _orphans(resources: list[Found], elsewhere: list[str]) -> Iterator[Found]:
    for resource in resources:
        if not is_of_this_machine(resource.labels):
            elsewhere.append(resource.name)
        elif has_ended(resource.labels):
            yield resource


def _old_pythons(daemon: Daemon) -> Iterator[Found]:
    try:
        current = host_image_name()
    except SandboxError:  # none can be made here, so none is in use
        current = ""
    for image in daemon.find_labelled("images", IMAGE_LABEL):  # snapshots and images built from ours have its label too
        is_ours = OWNER not in image.labels and (image.name.startswith(f"{IMAGE}:") or image.name == image.id)
        if is_ours and image.name != current:
            yield image
