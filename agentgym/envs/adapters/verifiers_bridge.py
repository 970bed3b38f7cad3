"""Rollouts of verifiers 0.4, which run in a process of the interpreter that has it: `verifiers_process.py`."""

from __future__ import annotations

import itertools
import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentgym.envs.adapters.other_python import OtherProcess, check_python
from agentgym.envs.adapters.verifiers_rollout import Asked, RolloutEnded
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.types import JSON

__all__ = ["VERSION", "Bridge", "BridgedRollout", "bridge_to"]

VERSION = "0.4."
"""The versions that the process reads."""
PROGRAM = Path(__file__).with_name("verifiers_process.py")
START_S = 300.0
"""The seconds to load the environment; importing verifiers alone takes ten seconds of CPU time."""
CANCEL_S = 10.0
"""The seconds in which a process that does not hang answers."""
MESSAGE_START = '{"id": '
MESSAGE = {"content": None, "reasoning_content": None, "tool_calls": None, "tool_call_id": None}
READY = 0
"""The number of the messages that are of no episode."""


class Bridge:
    """A process that plays an environment, for all episodes of this process; it ends with this process."""

    def __init__(self, python: str, name: str, settings: Mapping[str, JSON]) -> None:
        check_python(python, "verifiers", VERSION)
        path = Path(name)
        is_path = path.exists()
        module = path.stem if is_path else name
        self.name = name
        self._queues: dict[int, queue.SimpleQueue[dict[str, Any]]] = {READY: queue.SimpleQueue()}
        self._numbers = itertools.count(READY + 1)
        command = [python, "-P", str(PROGRAM), module, json.dumps(settings)]
        self._process = OtherProcess("stdio", command, [path.resolve().parent] if is_path else [], self._receive)
        try:
            answer = self._queues[READY].get(timeout=START_S)
        except queue.Empty:
            answer = {"fault": f"it was not loaded within {START_S:g} s"}
        if "ready" not in answer:
            self.close()
            raise ConfigError(f"verifiers cannot play {name}: {answer.get('refused') or answer['fault']}")
        self.num_rows = int(answer["ready"])

    @property
    def is_alive(self) -> bool:
        """True while the process answers."""
        return READY in self._queues

    def begin(self, row: int, timeout_s: float) -> BridgedRollout:
        """Begins a rollout of a row."""
        number = next(self._numbers)
        self._queues[number] = queue.SimpleQueue()
        self.send(number, row=row)
        return BridgedRollout(self, number, timeout_s)

    def next_message(self, number: int, timeout_s: float) -> dict[str, Any]:
        """The next message of an episode; raises EnvironmentFault if none comes in time.

        A process that does not even answer that the episode is cancelled hangs: it is ended.
        """
        messages = self._queues.get(number) if self.is_alive else None
        if messages is None:
            return {"fault": f"the process of {self.name} has ended"}
        try:
            return messages.get(timeout=timeout_s)
        except queue.Empty:
            self.send(number, cancel=True)
        try:
            messages.get(timeout=CANCEL_S)
        except queue.Empty:
            self.close()
        raise EnvironmentFault(f"the environment did nothing for {timeout_s:g} s")

    def send(self, number: int, **message: object) -> None:
        """Sends a message of an episode; one whose process has ended learns that from its next message."""
        self._process.send(json.dumps({"id": number, **message}))

    def forget(self, number: int) -> None:
        """Ends an episode, if it has not ended."""
        if self._queues.pop(number, None) is not None:
            self.send(number, cancel=True)

    def close(self) -> None:
        """Ends the process and all that it started; a second call does nothing."""
        self._process.close()

    def _receive(self, line: str | None) -> None:
        """Sorts messages by their episode; at the end of the process, each episode under way gets the reason."""
        if line is None:
            left = dict(self._queues)
            self._queues.clear()
            for messages in left.values():
                messages.put({"fault": f"its process ended: {self._process.last_lines}"})
        elif line.startswith(MESSAGE_START):  # else an import printed it
            message = json.loads(line)
            if (waiting := self._queues.get(message["id"])) is not None:
                waiting.put(message)


class BridgedRollout:
    """One rollout in the process: what `Rollout` is for verifiers 0.3."""

    def __init__(self, bridge: Bridge, number: int, timeout_s: float) -> None:
        self._bridge = bridge
        self._number = number
        self._timeout_s = timeout_s

    def next_event(self) -> Asked | RolloutEnded:
        """The next event; raises EnvironmentFault if the environment failed, or did nothing in time."""
        message = self._bridge.next_message(self._number, self._timeout_s)
        if "asked" not in message:
            self._bridge.forget(self._number)
        if "fault" in message:
            raise EnvironmentFault(f"the rollout failed: {message['fault']}")
        content = message.get("asked") or message["ended"]
        messages, errors = [_message(each) for each in content["messages"]], tuple(content["tool_errors"])
        if "asked" in message:
            tools = [SimpleNamespace(**tool) for tool in content["tools"]]
            return Asked(messages=messages, tools=tools, tool_errors=errors)
        verdict = {key: content[key] for key in ("reward", "metrics", "timed_out")}
        return RolloutEnded(messages=messages, tool_errors=errors, **verdict)

    def reply(self, text: str, reasoning: str | None, calls: list[tuple[str, str, str]]) -> None:
        """Passes on the model's reply: its text, and the id, the name and the arguments (as text) of each call."""
        tool_calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
        extra = {"reasoning_content": reasoning} if reasoning is not None else {}
        self._bridge.send(self._number, reply={"content": text, "tool_calls": tool_calls or None, **extra})

    def cancel(self) -> None:
        """Ends it, if it has not ended."""
        self._bridge.forget(self._number)


_bridges: dict[tuple[int, str, str, str], Bridge] = {}
_opening = threading.Lock()


def bridge_to(python: str | None, name: str, settings: Mapping[str, JSON]) -> Bridge:
    """Returns the process that plays an environment, or starts it; a forked child has its own."""
    python = python or sys.executable
    key = (os.getpid(), python, name, json.dumps(settings, sort_keys=True))
    with _opening:
        if key not in _bridges or not _bridges[key].is_alive:
            _bridges[key] = Bridge(python, name, settings)
        return _bridges[key]


def _message(content: Mapping[str, Any]) -> Any:
    """A message as the library has it: with attributes."""
    message = SimpleNamespace(**{**MESSAGE, **content})
    message.tool_calls = [SimpleNamespace(**call) for call in message.tool_calls or ()]
    return message
