"""An error of an environment is the same fault, whether it ran in a context here or its outcome came from elsewhere."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agentgym.errors import EnvironmentFault
from agentgym.rollout.hosting.env_code import ENV_CODE, EnvCallTimeout, attempt, unwrap_outcome

ERRORS = [
    ValueError("no such door\nand more"),
    SystemExit(3),
    GeneratorExit(),
    StopIteration(),
    EnvironmentFault("the disk is full", tool="save"),
]


def fail(error: BaseException) -> None:
    raise error


def raised_inside(error: BaseException) -> BaseException:
    with pytest.raises(BaseException) as caught, ENV_CODE:
        fail(error)
    return caught.value


def raised_outside(error: BaseException) -> BaseException:
    with pytest.raises(BaseException) as caught:
        unwrap_outcome(attempt(lambda: fail(error)))
    return caught.value


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_both_boundaries_raise_the_same_fault(error: BaseException) -> None:
    inside, outside = raised_inside(error), raised_outside(error)
    assert isinstance(inside, EnvironmentFault) and isinstance(outside, EnvironmentFault)
    assert (str(inside), inside.tool) == (str(outside), outside.tool)
    assert inside.__cause__ is outside.__cause__ is error


@pytest.mark.parametrize("error", [EnvCallTimeout("late"), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_a_time_out_ctrl_c_and_a_cancellation_stay_as_they_are(error: BaseException) -> None:
    assert raised_inside(error) is raised_outside(error) is error


def test_an_interrupt_on_another_thread_is_the_environments_own() -> None:
    errors: list[BaseException] = []
    thread = threading.Thread(target=lambda: errors.append(raised_inside(KeyboardInterrupt())))
    thread.start()
    thread.join()
    assert isinstance(errors[0], EnvironmentFault)
