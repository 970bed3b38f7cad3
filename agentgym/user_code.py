"""Finds what a user names by place, `path/to/file.py:name` or `package.module:name`, and names whose a fault is."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from agentgym.errors import AgentGymError, ConfigError, UnknownName, UserCodeFault, nearest

__all__ = ["blamed", "load_module", "load_object"]

MOST_SHOWN = 8
"""Names of a module that a message lists."""


def load_object(name: str, kind: str, hint: str = "") -> object:
    """What `path/to/file.py:name` or `package.module:name` names; `kind` is its noun in messages, `hint` what to do.

    Raises UnknownName where there is nothing of that name, and UserCodeFault where the module raises as it is loaded.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ConfigError(f"{kind} {name!r} names no function: write 'path/to/file.py:name' or 'package.module:name'")
    with blamed(f"{name} cannot be loaded"):
        module = load_module(place, f"the {kind} {name!r}", hint)
    if attribute not in vars(module):
        own = [key for key, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__]
        shown = ", ".join([*own[:MOST_SHOWN], *(["and more"] if len(own) > MOST_SHOWN else [])])
        near = nearest(attribute, own) or (f"; it has {shown}." if own else "; it has nothing of its own.")
        raise UnknownName(f"{place!r} has no {kind} {attribute!r}{near}{hint and ' '}{hint}")
    found: object = vars(module)[attribute]
    return found


def load_module(place: str, what: str, hint: str) -> ModuleType:
    """The module in a file, where `place` ends in `.py`, or of that import name; a file is loaded once.

    `what` (the environment 'a.b:C') and `hint` stand in the UnknownName for a module that does not exist. What the
    module itself raises comes through.
    """
    return _from_file(Path(place), hint) if place.endswith(".py") else _import(place, what, hint)


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Turns what a user's code raises within into a UserCodeFault that begins with `what`; our own errors stay."""
    try:
        yield
    except AgentGymError:
        raise
    except Exception as error:  # the boundary around the user's functions
        first_line = str(error).strip().partition("\n")[0]
        raise UserCodeFault(f"{what}: {type(error).__name__}: {first_line}") from error


def _import(place: str, what: str, hint: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a command finds the user's own modules where it is run
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module exists and lacks something it imports: that is what to tell
        raise UnknownName(
            f"no module {place!r} for {what}; give 'path/to/file.py:name', or run where the module can be imported."
            f"{hint and ' '}{hint}"
        ) from error


def _from_file(path: Path, hint: str) -> ModuleType:
    if not path.is_file():
        raise UnknownName(f"no file {str(path)!r}.{hint and ' '}{hint}")
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
