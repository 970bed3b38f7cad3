"""Loads objects named `package.module:name` or `path/to/file.py:name`, and marks errors of the user's own code."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from agentgym.errors import AgentGymError, ConfigError, UnknownName, UserCodeFault, describe_error, nearest

__all__ = ["Wanted", "code_path_of", "convert_user_errors", "is_code_path", "load_module", "load_named"]

_LOADING = threading.RLock()
MAX_SHOWN = 8
"""The most names of a module that a message lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A description of the object that is looked for, in the words of the messages."""

    noun: str
    """The noun for the object: `environment`."""
    example: str = "name"
    """A name as a user would write it: `Class`."""
    hint: str
    """A sentence on where the known ones are shown."""
    new: str = ""
    """Advice for a user without a file: `` `agentgym env new NAME` writes one to start from``."""
    fits: Callable[[object], bool] = callable
    """True for an object of a module that may be the wanted one; messages list these."""


def is_code_path(name: str) -> bool:
    """True if a name gives a location; `own.py`, which lacks the name after the colon, counts as one too."""
    return ":" in name or name.endswith(".py")


def load_named(name: str, description: Wanted) -> object:
    """Returns the object that `name` names.

    Raises ConfigError for a location without a name, UnknownName with the nearest name if the object does not exist,
    and UserCodeFault if the module raises while it is loaded.
    """
    module_path, _, attribute = name.rpartition(":")
    if not module_path or not attribute:
        raise ConfigError(
            f"{name!r} names no {description.noun}: write 'path/to/file.py:{description.example}' or "
            f"'package.module:{description.example}'"
        )
    module = load_module(module_path, name, description)
    if hasattr(module, attribute):
        target: object = getattr(module, attribute)
        return target
    fitting = [key for key, value in vars(module).items() if description.fits(value)]
    own = [key for key in fitting if getattr(getattr(module, key), "__module__", None) == module.__name__]
    listing = ", ".join([*own[:MAX_SHOWN], *(["and more"] if len(own) > MAX_SHOWN else [])])
    near = nearest(attribute, own) or (f"; it has {listing}." if own else "; it has none.")
    raise UnknownName(f"{module_path!r} has no {description.noun} {attribute!r}{near} {description.hint}")


def load_module(module_path: str, name: str, description: Wanted) -> ModuleType:
    """Returns the module at `module_path`, a dotted name or the path of a `.py` file; `name` is what the user wrote.

    A file is run once in a process. Raises UnknownName if there is no such module, and UserCodeFault for an error of
    the module itself, or an import that it lacks.
    """
    with convert_user_errors(f"{name} cannot be loaded"):
        return (
            _from_file(Path(module_path), description)
            if module_path.endswith(".py")
            else _import(module_path, name, description)
        )


def code_path_of(thing: object) -> str:
    """Returns `module:name`, by which a class or function can be found again if at all; a string is returned as is."""
    if isinstance(thing, str):
        return thing
    return f"{getattr(thing, '__module__', '?')}:{getattr(thing, '__qualname__', type(thing).__qualname__)}"


@contextmanager
def convert_user_errors(what: str) -> Iterator[None]:
    """Turns an error of a user's code into a UserCodeFault that begins with `what`; our own errors stay as they are."""
    try:
        yield
    except AgentGymError:
        raise
    except Exception as error:  # the boundary around the user's functions
        raise UserCodeFault(f"{what}: {describe_error(error)}") from error


def _import(module_path: str, name: str, description: Wanted) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a command finds the user's own modules where it is run
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_path}.".startswith(f"{error.name}."):
            raise  # the module exists and lacks something it imports: that error is the useful one
        raise UnknownName(
            f"no module {module_path!r} for the {description.noun} {name!r}; give "
            f"'path/to/file.py:{description.example}', or run where the module can be imported. {description.hint}"
        ) from error


def _from_file(path: Path, description: Wanted) -> ModuleType:
    if not path.is_file():
        advice = f"; {description.new}" if description.new else f". {description.hint}"
        raise UnknownName(f"no file {str(path)!r}{advice}")
    name = f"agentgym_user_{path.stem}_{sha256(os.fsencode(path.resolve())).hexdigest()[:16]}"  # in every process
    with _LOADING:  # another thread may be in the middle of the file
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
