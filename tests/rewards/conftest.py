"""Episodes made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

REASONS = {
    Status.COMPLETED: StopReason.TERMINATED,
    Status.TRUNCATED: StopReason.MAX_TURNS,
    Status.ENV_ERROR: StopReason.ENV_ERROR,
    Status.ENGINE_ERROR: StopReason.ENGINE_ERROR,
    Status.TIMEOUT: StopReason.DEADLINE,
    Status.CANCELLED: StopReason.CANCELLED,
    Status.AGENT_ERROR: StopReason.AGENT,
    Status.UNPLAYED: StopReason.AGENT,
}


@pytest.fixture(scope="session")
def episode() -> Callable[..., Trajectory]:
    """`episode("reply", truth=72)` is a finished one; `replies` are the turns before, `turn_tokens` the ids of each."""

    def make(
        reply: str = "",
        *,
        replies: Sequence[str] = (),
        status: Status = Status.COMPLETED,
        turn_tokens: int = 2,
        reasoning: str | None = None,
        member: int = 0,
        **task: Any,
    ) -> Trajectory:
        options = {**task.pop("options", {}), **({"ground_truth": task.pop("truth")} if "truth" in task else {})}
        texts = (*replies, reply)
        sampled = TokenSpan((7,) * turn_tokens, Source.POLICY, (-0.5,) * turn_tokens, (0,) * turn_tokens)
        opening = (Message("system", "Be right."), Message("user", "Six times seven?"))
        return Trajectory(
            task=Task("Ask-v0", 3, options),
            group="0/0",
            member=member,
            rows=(Row((TokenSpan((1, 2, 3), Source.PROMPT), *(sampled,) * len(texts)), opening),),
            turns=tuple(
                Turn(Message("assistant", text, reasoning), 0.25, observation="" if text is reply else "go on")
                for text in texts
            ),
            status=status,
            stop_reason=REASONS[status],
            error=None if status.trainable else "it broke",
            **task,
        )

    return make
