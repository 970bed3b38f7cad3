"""The boundary around an environment's code: whatever it raises becomes an EnvironmentFault."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar, cast

from agentgym.errors import CODE_ERRORS, AgentGymError, EnvironmentFault, describe_error, is_interrupt

__all__ = ["ENV_CODE", "CallOutcome", "EnvCallTimeout", "attempt", "unwrap_outcome", "unwrap_user_outcome"]

T = TypeVar("T")

CallOutcome: TypeAlias = "tuple[BaseException, None] | tuple[None, T]"
"""The outcome of user code: `(error, None)` or `(None, value)`. A plain value, since a future refuses some
exceptions."""


class EnvCallTimeout(AgentGymError, TimeoutError):
    """A call of an environment that ran longer than allowed."""


class _EnvCode:
    """A context in which an environment's code runs, without a frame of its own; it can be entered within itself.

    An error inside is raised as EnvironmentFault, with the error as its cause. EnvCallTimeout and Ctrl-C stay as they
    are.
    """

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None and isinstance(error, CODE_ERRORS) and not is_interrupt(error):
            _raise_fault(error)


ENV_CODE = _EnvCode()


def attempt(function: Callable[[], T]) -> CallOutcome[T]:
    """Runs the user's code and returns its outcome, to be handed to another thread or read as data."""
    try:
        return None, function()
    except CODE_ERRORS as error:  # SystemExit too: an environment that calls sys.exit() must not end the run
        if is_interrupt(error):
            raise
        return error, None


def unwrap_outcome(outcome: CallOutcome[T]) -> T:
    """Returns the value of an outcome; raises EnvironmentFault from the user's error (EnvCallTimeout as it is)."""
    error, value = outcome
    if error is not None:
        _raise_fault(error)
    return cast(T, value)


def unwrap_user_outcome(outcome: CallOutcome[T], what: str, seed: int | None = None) -> T:
    """Returns the value of an outcome, or raises its error: the environment's as an EnvironmentFault on `what`."""
    error, value = outcome
    if isinstance(error, AgentGymError) and not isinstance(error, EnvironmentFault):
        raise error
    if error is not None:
        cause = error.__cause__ if isinstance(error, EnvironmentFault) else error
        tool = getattr(error, "tool", "")
        raise EnvironmentFault(f"{what}: {describe_error(error)}", seed=seed, tool=tool) from cause
    return value  # type: ignore[return-value]  # no error: it is the value


def _raise_fault(error: BaseException) -> None:
    if isinstance(error, EnvCallTimeout):
        raise error
    raise EnvironmentFault(_describe_error(error), tool=getattr(error, "tool", "")) from error


def _describe_error(error: BaseException) -> str:
    """Returns one line: the error's type and the first line of its message."""
    if isinstance(error, SystemExit):
        return f"the environment called sys.exit({error.code!r})"
    return describe_error(error)
