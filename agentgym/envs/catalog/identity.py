"""The identity of an environment in results: id, version, package, and a digest of its code and data."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib.metadata import packages_distributions, version
from pathlib import Path

from gymnasium.envs.registration import registry

from agentgym.envs.adapters.namespaces import namespace_of
from agentgym.envs.base.card import version_of
from agentgym.envs.catalog.packages import DISTRIBUTION, EnvPackage, load_packages, top_module
from agentgym.types import JSON

__all__ = ["EnvIdentity", "identify_env"]

OURS = "agentgym"


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvIdentity:
    """The identity of an environment.

    Example: {"id": "Lock-v0", "version": 0, "package": "lock", "package_version": "0.1.0", "digest": "5c1d..."}
    """

    id: str
    """Its id, or the location of its class as it was given."""
    version: int | None
    """The number after `-v` in the id."""
    package: str | None
    """The installed package that it belongs to."""
    package_version: str | None
    digest: str | None
    """The digest of all files of its package, code and data; of the file of a class in a `.py` file; of the folder
    `agentgym/envs` for a bundled one. None for an environment of another library, such as textarena/Wordle-v0."""

    def to_json(self) -> dict[str, JSON]:
        """Returns the fields as JSON."""
        return asdict(self)


def identify_env(name: str) -> EnvIdentity:
    """Returns the identity of an environment by its name, without importing its module.

    `module:Id-v0` has to be resolved before, which registers the id.
    """
    module, _, last = name.rpartition(":")
    package, files = None, None
    if namespace_of(name) is None:
        if module.endswith(".py"):
            files = Path(module)
        else:
            owners = load_packages()
            entry = registry[last].entry_point if last in registry else module
            top = top_module(entry)
            package, files = owners.get(last) or _package_named(top), _folder_of(top)
    return EnvIdentity(
        id=name,
        version=version_of(name),
        package=package.name if package is not None else None,
        package_version=package.version if package is not None else None,
        digest=_digest(files) if files is not None else None,
    )


@functools.cache
def digest_of_files(path: Path) -> str:
    """Returns the digest, in hex, of a file, or of the names and contents of all files in a folder.

    Compiled and hidden files are left out. It is that of the first call in this process, as the code is.
    """
    digest = blake2b(digest_size=16)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        parts = file.relative_to(path).parts
        if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            content = blake2b(digest_size=16)
            with open(file, "rb") as stream:
                while block := stream.read(1 << 20):
                    content.update(block)
            digest.update("/".join(parts).encode() + b"\n" + content.digest())
    return digest.hexdigest()


def _digest(path: Path) -> str | None:
    """Returns the digest of a file or folder; None if a file cannot be read."""
    with contextlib.suppress(OSError):
        return digest_of_files(path) if path.exists() else None
    return None


def _package_named(top: str) -> EnvPackage | None:
    """Returns the package that installed a top-level module; None for a module outside of packages."""
    if top == OURS:
        return EnvPackage(DISTRIBUTION, sys.modules[OURS].__version__)
    names = packages_distributions().get(top)
    return EnvPackage(names[0], version(names[0])) if names else None


def _folder_of(top: str) -> Path | None:
    """Returns the folder of a top-level package, or the file of a module."""
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin)
    return folder if not spec.submodule_search_locations else folder.parent / ("envs" if top == OURS else "")
