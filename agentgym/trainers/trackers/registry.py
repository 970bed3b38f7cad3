"""Trackers by name, or by the location of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from agentgym.errors import ConfigError, UnknownName, nearest
from agentgym.extras import install_extra
from agentgym.loading import Wanted, convert_user_errors, is_code_path, load_named
from agentgym.trainers.trackers.protocol import Tracker

__all__ = ["TRACKERS", "open_tracker"]

TRACKERS = {
    "tensorboard": "TensorBoardTracker",
    "wandb": "WandbTracker",
    "mlflow": "MlflowTracker",
    "trackio": "TrackioTracker",
}
"""The class of each tracker, in the module of its name in this package; the library has the same name."""

_METHODS = ("begin", "step", "episodes", "finish")
_TRACKER = Wanted(noun="tracker", example="MyTracker", hint=f"Those with a name are {', '.join(TRACKERS)}.")


def open_tracker(name: str) -> Tracker:
    """Opens a tracker by name, or the user's own by its location, which is called without arguments.

    Raises ConfigError if its library is not installed, with the command that installs it, or if it is no tracker, and
    UnknownName for an unknown name.
    """
    if is_code_path(name):
        return _open_own(name)
    if name not in TRACKERS:
        raise UnknownName(
            f"unknown tracker {name!r}{nearest(name, TRACKERS) or '.'} Known: {', '.join(TRACKERS)}, or the place of"
            " one of yours, path/to/file.py:NAME"
        )
    try:
        module = import_module(f"agentgym.trainers.trackers.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("agentgym"):
            raise
        lacking = "" if error.name.partition(".")[0] == name else f" ({error.name} is missing)"
        raise ConfigError(
            f"the tracker {name} needs a library that is not installed{lacking}: {install_extra(name)}, or"
            f" pip install {name}"
        ) from error
    tracker: Tracker = getattr(module, TRACKERS[name])()
    return tracker


def _open_own(name: str) -> Tracker:
    make = load_named(name, _TRACKER)
    if not callable(make):
        raise ConfigError(f"the tracker {name} is a {type(make).__name__}: a class without arguments was wanted")
    with convert_user_errors(f"the tracker {name} cannot be made"):
        tracker = cast(Callable[[], object], make)()
    if lacking := [method for method in _METHODS if not callable(getattr(tracker, method, None))]:
        raise ConfigError(f"the tracker {name} lacks {', '.join(lacking)}: a tracker has {', '.join(_METHODS)}")
    return cast(Tracker, tracker)
