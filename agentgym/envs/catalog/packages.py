"""Environments of other installed packages: those that depend on agentgym and have Gymnasium's entry point.

Gymnasium up to 0.29 called the functions of the group `gymnasium.envs` when it was imported; 1.x does not. Here they
are called when an id is not known, and for a list of ids.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import logging
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from agentgym.errors import describe_error
from agentgym.extras import DISTRIBUTION

__all__ = ["DISTRIBUTION", "EnvPackage", "load_packages", "summary_of", "top_module"]

_log = logging.getLogger(__name__)
GROUP = "gymnasium.envs"
WITHOUT_NAMESPACE = ("__root__", "__internal__")
_loaded: dict[str, frozenset[str]] = {}
"""The ids that each entry point registered, by `module:function`; none for one that raised."""


@dataclass(frozen=True, slots=True)
class EnvPackage:
    """An installed package, by the name and version that pip shows."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def load_packages() -> dict[str, EnvPackage]:
    """Registers the environments of other packages with Gymnasium, once; returns the package of each id.

    The modules of the environments are not imported. A package whose function raises is left out with a warning.
    """
    owners: dict[str, EnvPackage] = {}
    for point in entry_points(group=GROUP):
        package = _package_of(point)
        if package is not None:
            owners |= dict.fromkeys(sorted(_register(point, package)), package)
    return owners


def summary_of(entry_point: object, package: EnvPackage) -> str:
    """Returns the first paragraph of a class's docstring, read from its file; that of the package if there is none."""
    with contextlib.suppress(ImportError, OSError, SyntaxError, ValueError):
        module, _, name = str(entry_point).partition(":")
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            for node in ast.parse(Path(spec.origin).read_bytes()).body:
                if isinstance(node, ast.ClassDef) and node.name == name and (text := ast.get_docstring(node)):
                    return text.partition("\n\n")[0].replace("\n", " ")
    with contextlib.suppress(PackageNotFoundError):
        return str(distribution(package.name).metadata["Summary"] or "")
    return ""


def _package_of(point: EntryPoint) -> EnvPackage | None:
    """Returns the package of an entry point if it depends on agentgym."""
    dist = point.dist
    if dist is None or canonicalize_name(dist.name) == DISTRIBUTION:
        return None
    for text in dist.requires or ():
        with contextlib.suppress(InvalidRequirement):
            if canonicalize_name(Requirement(text).name) == DISTRIBUTION:
                return EnvPackage(dist.name, dist.version)
    return None


def _register(point: EntryPoint, package: EnvPackage) -> frozenset[str]:
    """Calls the function of an entry point, once in a process; returns the ids that are the package's."""
    from gymnasium.envs import registration  # here: the start-up hook asks before all of Gymnasium is there

    if point.value not in _loaded:
        _loaded[point.value] = frozenset()
        before = set(registration.registry)
        try:
            free = point.name in WITHOUT_NAMESPACE
            with contextlib.nullcontext() if free else registration.namespace(point.name):
                point.load()()
        except Exception as error:  # noqa: BLE001  # the boundary: it is another package's code
            _log.warning("the environments of %s are not registered: %s", package, describe_error(error))
            return frozenset()
        top = point.module.partition(".")[0]
        _loaded[point.value] = frozenset(
            env_id
            for env_id, spec in registration.registry.items()
            if env_id not in before or top_module(spec.entry_point) == top  # an import of it may have registered them
        )
    return _loaded[point.value]


def top_module(entry_point: object) -> str:
    """Returns the top-level package of the class or the location in an entry of Gymnasium's registry."""
    entry = entry_point if isinstance(entry_point, str) else str(getattr(entry_point, "__module__", ""))
    return entry.partition(":")[0].partition(".")[0]
