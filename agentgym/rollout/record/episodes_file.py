"""`episodes.jsonl`: one line per episode, complete enough to train on again and equal for equal seeds.

`episodes.jsonl.zst` has the same lines, compressed (`frames.py`).

Each line has a digest over itself and the line before (`chain.py`). The tools that its models were shown are in
`tools.jsonl` next to it, each set once; rows name them by digest.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentgym.errors import RunFolderError
from agentgym.rollout.hosting.event_loop import finish_uninterrupted
from agentgym.rollout.record import tools_file as tool_menus
from agentgym.rollout.record.chain import ChainedFile, LineFile, PackedFile
from agentgym.rollout.record.episode_digests import credit_digest, mask_runs, row_digest
from agentgym.rollout.record.json_pieces import PIECE, encode_json, json_pieces
from agentgym.rollout.record.line_reader import FILE_NAME, PACKED_NAME, LineReader, find_episodes
from agentgym.rollout.record.stored_fields import NO_EPISODE, check_fields, check_numbers, check_stored_ids
from agentgym.rollout.record.tools_file import Menus, menu_digest, menu_lines, read_menus
from agentgym.routed_experts import RoutedExperts
from agentgym.trajectory import Row, RowOrigin, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import JSON, AnyCall, MalformedCall, Message, Task, ToolCall, ToolResult

__all__ = [
    "EpisodeRecord",
    "EpisodeWriter",
    "episode_text",
    "message_from_json",
    "read_episodes",
    "record_from_json",
    "trajectory_from_json",
    "trajectory_to_json",
]

logger = logging.getLogger(__name__)

AFTER_STEP = ("eval_during", "eval_after")
"""The phases of evaluations that are played after a step, under its number."""
_LEVELS = {"rows": 4, "turns": 1, "advantages": 1}
"""The levels of objects and lists that are encoded one by one, by the names of a line; a row's spans are the fourth."""
Advantages = Sequence[Sequence[float]]
"""The advantages of each row, one number per POLICY id."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One line of the file: the episode, and what the step computed for it."""

    trajectory: Trajectory
    phase: str
    step: int
    advantages: tuple[tuple[float, ...], ...] | None = None
    """The advantages of each row, one number per POLICY id; None if nothing was trained."""


def trajectory_to_json(
    trajectory: Trajectory, *, phase: str = "train", step: int = 0, advantages: Advantages | None = None
) -> dict[str, JSON]:
    """Returns the JSON object of an episode, without wall-clock timings, so equal seeds give equal objects."""
    task = trajectory.task
    return {
        "phase": phase,
        "step": step,
        "group": trajectory.group,
        "member": trajectory.member,
        "task": {"env_id": task.env_id, "seed": task.seed, "options": task.options, "kwargs": task.kwargs},
        "status": trajectory.status,
        "stop_reason": trajectory.stop_reason,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "metrics": trajectory.metrics,
        "error": trajectory.error,
        "info": trajectory.info,
        "rows": [_row_to_json(row) for row in trajectory.rows],
        "turns": [_turn_to_json(turn) for turn in trajectory.turns],
        "advantages": advantages,
        "credit": credit_digest([turn.reward for turn in trajectory.turns], advantages),
    }


def trajectory_from_json(line: Mapping[str, Any], menus: Menus | None = None) -> Trajectory:
    """Returns the trajectory of a line; raises KeyError, TypeError or ValueError if it is not one.

    `menus` are the tool sets that rows name; the tools of any other set are unknown.
    """
    check_fields(line)
    return Trajectory(
        task=Task(**line["task"]),
        group=line["group"],
        member=line["member"],
        rows=tuple(row_from_json(row, menus or {}) for row in line["rows"]),
        turns=tuple(_turn_from_json(turn) for turn in line["turns"]),
        status=Status(line["status"]),
        stop_reason=StopReason(line["stop_reason"]),
        metrics=line["metrics"],
        error=line["error"],
        info=line["info"],
    )


class EpisodeWriter:
    """Appends episodes to `folder/episodes.jsonl`, whole lines or nothing, and the tools they name to `tools.jsonl`.

    With `compress`, the file is `episodes.jsonl.zst`; one that is there already keeps its form. Without `tokens`, ids,
    logprobs and advantages are left out. A line that a kill left incomplete is removed when the file is opened again.
    """

    def __init__(self, folder: str | Path, *, compress: bool = False, tokens: bool = True) -> None:
        folder = Path(folder)
        self._has_tokens = tokens
        self.path = find_episodes(folder) or folder / (PACKED_NAME if compress else FILE_NAME)
        self._lines = PackedFile(self.path) if self.path.name == PACKED_NAME else ChainedFile(self.path)
        self._tools: LineFile | None = None
        self._menus = set(read_menus(self.path.parent))
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def head(self) -> str:
        """The digest of the last line, which is over all lines before it."""
        return self._lines.head

    def write(
        self,
        trajectories: Iterable[Trajectory],
        *,
        phase: str = "train",
        step: int = 0,
        advantages: Iterable[Advantages | None] | None = None,
    ) -> None:
        """Appends a step's episodes, all or none; `advantages` has one entry per trajectory.

        Lines are encoded and written in pieces, so that other threads go on meanwhile and memory stays bounded.
        Raises RunFolderError if the disk does not take them; the lines before them stay as they are.
        """
        trajectories = list(trajectories) if self._has_tokens else [episode.without_ids() for episode in trajectories]
        credit = advantages if self._has_tokens else None
        per_trajectory = credit if credit is not None else [None] * len(trajectories)
        with self._lock:
            self._write_tools(trajectories)
            lines = (
                episode_text(trajectory, phase=phase, step=step, advantages=values)
                for trajectory, values in zip(trajectories, per_trajectory, strict=True)
            )
            if trajectories:
                self._lines.append(self._until_closed(lines))

    async def append(
        self,
        trajectories: Iterable[Trajectory],
        *,
        phase: str = "train",
        step: int = 0,
        advantages: Iterable[Advantages | None] | None = None,
    ) -> None:
        """Does what `write` does in another thread, so that the event loop goes on.

        A cancellation is passed on after the write, which is finished first.
        """
        await finish_uninterrupted(
            asyncio.to_thread(self.write, trajectories, phase=phase, step=step, advantages=advantages)
        )

    def _until_closed(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            if self._is_closed:
                raise RunFolderError(f"{str(self.path)!r} was closed while episodes were written: they are left out")
            yield line

    def _write_tools(self, trajectories: Iterable[Trajectory]) -> None:
        """Appends the tool sets that the file lacks."""
        tool_sets = {
            id(row.tools): row.tools for trajectory in trajectories for row in trajectory.rows if row.tools is not None
        }
        lacking = {menu_digest(tools): tools for tools in tool_sets.values()}
        lacking = {digest: tools for digest, tools in lacking.items() if digest not in self._menus}
        if lacking:
            self._tools = self._tools or LineFile(self.path.with_name(tool_menus.FILE_NAME))
            self._tools.write(menu_lines(lacking))
            self._menus |= set(lacking)

    def rewind(self, step: int) -> None:
        """Drops what a run that is resumed at `step` writes again: later steps, and an evaluation after this one.

        With a step below 0, all lines are dropped.
        """

        def is_dropped(line: bytes) -> bool:
            episode = json.loads(line)
            return bool(episode["step"] > step or (episode["step"] == step and episode["phase"] in AFTER_STEP))

        self._lines.cut_from(is_dropped)

    def close(self) -> None:
        """Closes the files; a second call does nothing. A write in another thread is undone."""
        self._is_closed = True
        with self._lock:
            self._lines.close()
            if self._tools is not None:
                self._tools.close()

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def episode_text(
    trajectory: Trajectory, *, phase: str = "train", step: int = 0, advantages: Advantages | None = None
) -> str:
    """Returns the text of `trajectory_to_json`; an episode of many tokens is encoded in pieces."""
    episode = trajectory_to_json(trajectory, phase=phase, step=step, advantages=advantages)
    if trajectory.num_tokens <= PIECE:
        return encode_json(episode)
    pieces: list[str] = []
    for name, value in episode.items():
        pieces += [",", encode_json(name), ":", *json_pieces(value, _LEVELS.get(name, 0))]
    return f"{{{''.join(pieces[1:])}}}"


def read_episodes(path: str | Path) -> Iterator[EpisodeRecord]:
    """Yields the episodes of a run folder (or of the file itself), in the order they were written.

    The file may be plain or compressed; a path of the plain one finds the compressed one where there is no other.
    An incomplete last line, left by a kill, is dropped with a warning. Any other line that is not an episode, or a
    missing file, raises RunFolderError.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    if path.name == FILE_NAME:
        path = find_episodes(path.parent) or path
    if not path.is_file():
        raise RunFolderError(f"{str(path)!r} does not exist: a run folder that has played an episode holds it")
    menus = read_menus(path.parent)
    with LineReader(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                logger.warning("%s: line %d is torn (the run was killed while writing); it is dropped", path, number)
                return
            try:
                yield record_from_json(json.loads(line), menus)
            except NO_EPISODE as error:
                raise RunFolderError(f"{str(path)!r}, line {number} is not an episode: {error!r:.300}") from error


def record_from_json(line: Mapping[str, Any], menus: Menus | None = None) -> EpisodeRecord:
    """Returns the episode of a line; see `trajectory_from_json`."""
    advantages = line["advantages"]
    for row in advantages or ():
        check_numbers(row, (int, float), "advantages")
    rows = None if advantages is None else tuple(tuple(row) for row in advantages)
    return EpisodeRecord(trajectory_from_json(line, menus), line["phase"], line["step"], rows)


def _row_to_json(row: Row) -> dict[str, JSON]:
    spans = [_span_to_json(span) for span in row.spans]
    stored: dict[str, JSON] = {"spans": spans, "mask": mask_runs(spans), "digest": row_digest(spans)}
    if row.tools is not None:
        stored["tools"] = menu_digest(row.tools)
    if row.messages is not None:
        stored["messages"] = [_message_to_json(message) for message in row.messages]
    if row.origin is not None:
        stored["origin"] = asdict(row.origin)
    return stored


def row_from_json(row: Mapping[str, Any], menus: Menus) -> Row:
    """Returns a stored row; raises one of NO_EPISODE if it is none."""
    messages = row.get("messages")
    messages_read = None if messages is None else tuple(map(message_from_json, messages))
    spans, tools = tuple(_span_from_json(span) for span in row["spans"]), menus.get(row.get("tools", ""))
    return Row(spans, messages_read, tools, None if row.get("origin") is None else RowOrigin(**row["origin"]))


def _span_to_json(span: TokenSpan) -> dict[str, JSON]:
    if span.source is not Source.POLICY:
        return {"source": span.source, "ids": span.ids}
    # repr of a float is the shortest text that reads back as the same number, on every platform
    return {
        "source": span.source,
        "ids": span.ids,
        "logprobs": span.logprobs,
        "policy_versions": span.policy_versions,
        **({} if span.experts is None else {"experts": span.experts.to_json()}),
        **({"excluded": span.excluded} if span.excluded else {}),
    }


def _span_from_json(span: Mapping[str, Any]) -> TokenSpan:
    check_stored_ids(span["ids"])
    if span["source"] != Source.POLICY:
        return TokenSpan(tuple(span["ids"]), Source(span["source"]))
    check_numbers(span["logprobs"], (int, float), "logprobs")
    check_numbers(span["policy_versions"], (int,), "policy_versions")
    experts = RoutedExperts.from_json(span["experts"]) if "experts" in span else None
    sampled = (tuple(span["logprobs"]), tuple(span["policy_versions"]), experts)
    excluded = span.get("excluded", "")  # true in the files of earlier versions, which had no reasons
    return TokenSpan(tuple(span["ids"]), Source.POLICY, *sampled, excluded=str(excluded) if excluded else "")


def _turn_to_json(turn: Turn) -> dict[str, JSON]:
    return {
        "message": _message_to_json(turn.message),
        "reward": turn.reward,
        "observation": turn.observation,
        "tool_results": [
            {"call_id": result.call_id, "name": result.name, "content": result.content, "error": result.error}
            for result in turn.tool_results
        ],
        "finish_reason": turn.finish_reason,
        **({"stop": turn.stop} if turn.stop else {}),
        **({"asked": turn.asked} if turn.asked else {}),
        **({} if turn.order is None else {"order": turn.order}),
        **({} if turn.messages is None else {"messages": [_message_to_json(message) for message in turn.messages]}),
    }


def _turn_from_json(turn: Mapping[str, Any]) -> Turn:
    return Turn(
        message_from_json(turn["message"]),
        turn["reward"],
        turn["observation"],
        tuple(ToolResult(**result) for result in turn["tool_results"]),
        turn["finish_reason"],
        turn.get("asked", ""),
        None if turn.get("messages") is None else tuple(map(message_from_json, turn["messages"])),
        turn.get("stop", ""),
        turn.get("order"),
    )


def _message_to_json(message: Message) -> dict[str, JSON]:
    answered = {"tool_call_id": message.tool_call_id, "name": message.name}
    return {
        "role": message.role,
        "content": message.content,
        "reasoning": message.reasoning,
        "tool_calls": [_call_to_json(call) for call in message.tool_calls],
        **{name: value for name, value in answered.items() if value is not None},
    }


def message_from_json(message: Mapping[str, Any]) -> Message:
    """Returns the message of a stored object; raises KeyError, TypeError or ConfigError if it is not one."""
    calls = tuple(_call_from_json(call) for call in message["tool_calls"])
    answered = {name: message[name] for name in ("tool_call_id", "name") if name in message}
    return Message(message["role"], message["content"], message["reasoning"], calls, **answered)


def _call_to_json(call: AnyCall) -> dict[str, JSON]:
    if isinstance(call, MalformedCall):
        cut: dict[str, JSON] = {"truncated": True} if call.truncated else {}
        return {"id": call.id, "raw": call.raw, "error": call.error, **cut}
    return {"id": call.id, "name": call.name, "arguments": call.arguments}


def _call_from_json(call: Mapping[str, Any]) -> AnyCall:
    return MalformedCall(**call) if "raw" in call else ToolCall(**call)
