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
MESSAGE_START = '{"agentgym": '
MESSAGE = {"content": None, "reasoning_content": None, "tool_calls": None, "tool_call_id": None}
READY = 0
"""The number of the messages that are of no episode."""


class Bridge:
    """A process that plays an environment, for all episodes of this process; it ends with this process."""

    def __init__(self, python: str, name: str, settings: Mapping[str, JSON]) -> None:
        check_python(python, "verifiers", VERSION)
        path = Path(name)
        is_path = path.exists()
        self.queues: dict[int, queue.SimpleQueue[dict[str, Any]]] = {READY: queue.SimpleQueue()}
        """The messages that each episode has not read."""
        self.numbers = itertools.count(READY + 1)
        command = [python, "-P", str(PROGRAM), path.stem if is_path else name, json.dumps(settings)]
        self.process = OtherProcess("stdio", command, [path.resolve().parent] if is_path else [], self._receive)
        try:
            answer = self.queues[READY].get(timeout=START_S)
        except queue.Empty:
            answer = {"fault": f"it was not loaded within {START_S:g} s"}
        if "ready" not in answer:
            self.process.close()
            reason = " ".join((answer.get("refused") or answer["fault"]).split())
            raise ConfigError(f"verifiers cannot play {name}: {reason}")
        self.num_rows = int(answer["ready"])

    @property
    def is_alive(self) -> bool:
        """True while the process answers."""
        return READY in self.queues

    def send(self, number: int, **message: object) -> None:
        """Sends a message of an episode; one whose process has ended learns that from its next message."""
        self.process.send(json.dumps({"agentgym": number, **message}))

    def _receive(self, line: str | None) -> None:
        """Sorts messages by their episode; at the end of the process, each episode under way gets the reason."""
        if line is None:
            left = dict(self.queues)
            self.queues.clear()
            for messages in left.values():
                messages.put({"fault": f"its process ended: {self.process.last_lines}"})
        elif line.startswith(MESSAGE_START):  # else it is printed text
            message = json.loads(line)
            if (waiting := self.queues.get(message["agentgym"])) is not None:
                waiting.put(message)


class BridgedRollout:
    """One rollout of a row in the process: what `Rollout` is for verifiers 0.3."""

    def __init__(self, bridge: Bridge, row: int, timeout_s: float) -> None:
        self._bridge = bridge
        self._number = next(bridge.numbers)
        self._timeout_s = timeout_s
        self._messages = bridge.queues[self._number] = queue.SimpleQueue()
        if not bridge.is_alive:
            self._messages.put({"fault": "its process has ended"})
        bridge.send(self._number, row=row)

    def next_event(self) -> Asked | RolloutEnded:
        """The next event; raises EnvironmentFault if the environment failed, or did nothing in time."""
        message = self._next_message()
        if "asked" not in message:
            self.cancel()
        if "fault" in message:
            raise EnvironmentFault(f"the rollout failed: {' '.join(message['fault'].split())}")
        content = message.get("asked") or message["ended"]
        content["messages"] = [_message(each) for each in content["messages"]]
        content["tool_errors"] = tuple(content["tool_errors"])
        if "ended" in message:
            return RolloutEnded(**content)
        return Asked(**{**content, "tools": [SimpleNamespace(**tool) for tool in content["tools"]]})

    def reply(self, text: str, reasoning: str | None, calls: list[tuple[str, str, str]]) -> None:
        """Passes on the model's reply: its text, and the id, the name and the arguments (as text) of each call."""
        functions = [(call_id, {"name": name, "arguments": arguments}) for call_id, name, arguments in calls]
        tool_calls = [{"id": call_id, "type": "function", "function": function} for call_id, function in functions]
        extra = {"reasoning_content": reasoning} if reasoning is not None else {}
        self._bridge.send(self._number, reply={"content": text, "tool_calls": tool_calls or None, **extra})

    def cancel(self) -> None:
        """Ends it, if it has not ended."""
        if self._bridge.queues.pop(self._number, None) is not None:
            self._bridge.send(self._number, cancel=True)

    def _next_message(self) -> dict[str, Any]:
        """Returns the next message. A process that does not even answer a cancellation hangs, and is ended."""
        try:
            return self._messages.get(timeout=self._timeout_s)
        except queue.Empty:
            self._bridge.send(self._number, cancel=True)
        try:
            self._messages.get(timeout=CANCEL_S)
        except queue.Empty:
            self._bridge.process.close()
        raise EnvironmentFault(f"the environment did nothing for {self._timeout_s:g} s")


_bridges: dict[tuple[int, str, str, str], Bridge] = {}
_opening = threading.Lock()


def bridge_to(python: str | None, name: str, settings: Mapping[str, JSON]) -> Bridge:
    """Returns the process that plays an environment, or starts it; a forked child has its own."""
    python = os.path.expanduser(python or sys.executable)
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
