"""Loads what a user names in code of their own: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from agentgym.errors import ConfigError, UnknownName, nearest

__all__ = ["Wanted", "load_module", "load_object"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a name is to lead to, for the messages where it does not."""

    kind: str
    """A noun: environment."""
    fits: Callable[[object], bool]
    """Whether a part of a module is one: those are named where the wanted one is not there."""
    form: str
    """What to write after the colon: Class."""
    no_file: str = ""
    """What to do where there is no such file."""
    no_name: str = ""
    """What to do where a module is there and has no such part."""
    no_module: str = ""
    """What to do where there is no such module."""


def load_object(name: str, wanted: Wanted) -> object:
    """The part of a module that `name` leads to.

    Raises UnknownName, with the nearest right name, where there is no such module, file or part; what the module itself
    raises when it is loaded is not caught.
    """
    place, _, attribute = name.rpartition(":")
    module = _load_file(Path(place), wanted) if place.endswith(".py") else load_module(place, name, wanted)
    try:
        return getattr(module, attribute)
    except AttributeError:
        own = [key for key, value in vars(module).items() if wanted.fits(value) and _is_from(value, module)]
        near = nearest(attribute, own) or f"; it has {', '.join(own) or f'no {wanted.kind}'}."
        raise UnknownName(f"{place!r} has no {attribute!r}{near} {wanted.no_name}".rstrip()) from None


def load_module(place: str, name: str, wanted: Wanted) -> ModuleType:
    """The module `place`, which the user named in `name`; it may lie in the folder where the command is run."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module exists and lacks something it imports: that is what to tell
        raise UnknownName(
            f"no module {place!r} for the {wanted.kind} {name!r}; give 'path/to/file.py:{wanted.form}', or run where "
            f"the module can be imported. {wanted.no_module}".rstrip()
        ) from error


def _is_from(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", module.__name__) == module.__name__


def _load_file(path: Path, wanted: Wanted) -> ModuleType:
    if not path.is_file():
        raise UnknownName(f"no file {str(path)!r}; {wanted.no_file}".rstrip("; "))
    name = f"agentgym_user_{path.stem}_{abs(hash(path.resolve())):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{str(path)!r} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
