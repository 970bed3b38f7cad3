"""Functions that read an episode for a reward: the reply, the conversation, the true answer."""

from __future__ import annotations

from collections.abc import Mapping

from agentgym.openai_wire import message_from_openai
from agentgym.rewards.reward import InvalidReward
from agentgym.rollout.hosting.answer import plain_answers
from agentgym.trajectory import Trajectory, Turn
from agentgym.types import JSON, Message, Task

__all__ = ["conversation", "ground_truth", "last_reply", "opening", "whole_reply"]


def ground_truth(task: Task) -> JSON:
    """Returns `task.options["ground_truth"]`; raises InvalidReward if the task has none."""
    if task.options.get("ground_truth") is None:
        have = ", ".join(sorted(task.options)) or "none"
        raise InvalidReward(f'a task of {task.env_id} has no options["ground_truth"] to score by; its options: {have}')
    return task.options["ground_truth"]


def last_reply(trajectory: Trajectory) -> str:
    """Returns the last assistant message's text without its reasoning; summaries that were requested do not count."""
    return _last(trajectory).content


def whole_reply(trajectory: Trajectory) -> str:
    """Returns `last_reply` with its reasoning in front, in `<think>` marks whatever the model's own are."""
    message = _last(trajectory)
    return message.content if message.reasoning is None else f"<think>{message.reasoning}</think>{message.content}"


def _last(trajectory: Trajectory) -> Message:
    replies = [turn.message for turn in trajectory.turns if not turn.asked]
    return replies[-1] if replies else Message("assistant", "")


def opening(trajectory: Trajectory) -> tuple[Message, ...]:
    """Returns the messages that the conversation began with; empty if the record does not contain them."""
    if trajectory.rows and trajectory.rows[0].messages is not None:
        return trajectory.rows[0].messages
    without_ids = trajectory.info.get("ids_left_out") or trajectory.info.get("chat_endpoint")
    messages = without_ids.get("opening") if isinstance(without_ids, Mapping) else None
    messages = trajectory.task.options.get("messages", ()) if messages is None else messages
    return tuple(map(message_from_openai, messages)) if isinstance(messages, (list, tuple)) else ()


def conversation(trajectory: Trajectory) -> tuple[Message, ...]:
    """Returns all messages in order: the opening, the replies and the answers to them."""
    messages = list(opening(trajectory))
    for turn in trajectory.turns:
        if not turn.asked:
            messages += [turn.message, *_answer(turn)]
    while messages and messages[-1].role == "user" and not messages[-1].content:
        messages.pop()  # the empty observation of an environment that ended
    return tuple(messages)


def _answer(turn: Turn) -> tuple[Message, ...]:
    return next(plain_answers(turn.observation, turn.tool_results)) if turn.messages is None else turn.messages
