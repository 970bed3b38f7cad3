"""The checks that one recorded episode passes or fails by itself, on the JSON of the file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.stop_strings import find_stop
from agentgym.errors import InvalidTrajectory, RenderError
from agentgym.evaluation.run_check.basis import Basis, Record, StoredSpan
from agentgym.evaluation.run_check.once_check import check_once
from agentgym.rollout.hosting.answer import plain_answers
from agentgym.rollout.record.episode_digests import credit_digest, mask_runs, row_digest
from agentgym.rollout.record.episodes_file import message_from_json
from agentgym.rollout.record.ledger import Ledger, Violation, first_difference
from agentgym.trajectory import Status
from agentgym.types import Message, ToolResult

__all__ = [
    "CHECKS",
    "by_endpoint",
    "lacks_ids",
]

Check: TypeAlias = Callable[[Ledger, int, Record, Basis], None]


def by_endpoint(record: Record) -> bool:
    """Returns True if a chat endpoint played the episode, which rendered its prompts and parsed its replies."""
    return isinstance(record["info"].get("chat_endpoint"), Mapping)


def lacks_ids(record: Record) -> bool:
    """Returns True if the record leaves out the ids on purpose (record.tokens)."""
    return isinstance(record["info"].get("ids_left_out"), Mapping)


def _check_spans(ledger: Ledger, line: int, record: Record, _: Basis) -> None:
    turn = -1
    if record["turns"] and not record["rows"] and not (by_endpoint(record) or lacks_ids(record)):
        text = f"{len(record['turns'])} turns and no token; only a chat endpoint's episode may hold none"
        ledger.check("spans", Violation(line, problem=text))
    for row, stored in enumerate(record["rows"]):
        problem = None
        sources = [span["source"] for span in stored["spans"]]
        replies_before = turn + 1
        turn += sources.count("policy")
        if not sources or sources[0] != "prompt" or not stored["spans"][0]["ids"]:
            problem = Violation(line, row, problem="the row does not begin with a prompt")
        elif "prompt" in sources[1:]:
            problem = Violation(line, row, problem="a prompt is inside the row")
        for index, (source, following) in enumerate(pairwise(sources)):
            if source == following == "policy" and problem is None:
                reply = replies_before + sources[: index + 1].count("policy")
                problem = Violation(line, row, reply, problem="a reply follows a reply with no answer in between")
        if problem is None and row == len(record["rows"]) - 1 and turn + 1 != len(record["turns"]):
            problem = Violation(line, row, problem=f"{turn + 1} replies, but {len(record['turns'])} turns")
        ledger.check("spans", problem)


def _check_digests(ledger: Ledger, line: int, record: Record, basis: Basis) -> None:
    for row, stored in enumerate(record["rows"]):
        expected_mask, stored_mask = mask_runs(stored["spans"]), stored.get("mask")
        problem = None
        if stored_mask is None:
            problem = Violation(line, row, problem="the row stores no mask")
        elif stored_mask != expected_mask:
            token = first_difference(_bits(stored_mask), _bits(expected_mask))
            text = "a bit differs from the token's provenance"
            problem = Violation(line, row, _turn_at(record, row, token, basis), token, text)
        ledger.check("mask", problem)
        stored_mask = stored.get("digest")
        problem = None
        if stored_mask is None:
            problem = Violation(line, row, problem="the row stores no digest")
        elif stored_mask != row_digest(stored["spans"]):
            problem = Violation(line, row, problem="an id, source, logprob or version is not the one that was written")
        ledger.check("digest", problem)


def _bits(runs: Sequence[Sequence[int]]) -> list[int]:
    return [bit for bit, length in runs for _ in range(length)]


def _turn_at(record: Record, row: int, token: int, basis: Basis) -> int | None:
    turns = [span.turn for span in basis.spans(record) if span.row == row and span.start <= token]
    return turns[-1] if turns and turns[-1] >= 0 else None


def _check_samples(ledger: Ledger, line: int, record: Record, basis: Basis) -> None:
    last_version = 0
    low, high = _version_bounds(record, basis.max_staleness)
    for span in basis.spans(record):
        logprobs, versions = span.raw.get("logprobs"), span.raw.get("policy_versions")
        if span.start == 0 and record["rows"][span.row].get("origin") is not None:
            last_version = 0  # branches are sampled side by side
        at = partial(Violation, line, span.row, span.turn if span.turn >= 0 else None)
        if span.source != "policy":
            stray = logprobs is not None or versions is not None
            problem = at(token=span.start, problem=f"a {span.source} span was not sampled") if stray else None
            ledger.check("logprobs", problem)
            continue
        problem = None
        if logprobs is None or len(logprobs) != len(span.ids):
            have = "no" if logprobs is None else len(logprobs)
            problem = at(token=span.start, problem=f"{len(span.ids)} sampled ids have {have} logprobs")
        else:
            bad = [i for i, value in enumerate(logprobs) if not (math.isfinite(value) and value <= 1e-6)]
            if bad:
                text = f"logprob {logprobs[bad[0]]} is not finite and at most 0"
                problem = at(token=span.start + bad[0], problem=text)
        ledger.check("logprobs", problem)
        problem = None
        if versions is None or len(versions) != len(span.ids):
            have = "no" if versions is None else len(versions)
            problem = at(token=span.start, problem=f"{len(span.ids)} sampled ids have {have} versions")
        for index, version in enumerate(versions or ()):
            if version < last_version and problem is None:
                text = f"policy version {version} follows {last_version}"
                problem = at(token=span.start + index, problem=text)
            elif not low <= version <= high and problem is None:
                text = f"policy version {version} in step {record['step']}, which samples with {_between(low, high)}"
                problem = at(token=span.start + index, problem=text)
            last_version = version
        ledger.check("versions", problem)


def _version_bounds(record: Record, max_staleness: int | None) -> tuple[float, float]:
    """Returns the least and the greatest policy version with which an episode of a training run may be sampled."""
    if max_staleness is None:
        return -math.inf, math.inf
    step: int = record["step"]
    if record["phase"] in ("train", "greedy"):  # step 1 is sampled with version 0
        return max(0, step - 1 - max_staleness), step - 1
    return step, step


def _between(low: float, high: float) -> str:
    return f"version {low:g}" if low == high else f"versions {low:g} to {high:g}"


def _check_ids(ledger: Ledger, line: int, record: Record, basis: Basis) -> None:
    if basis.renderer is None:
        return
    for span in basis.spans(record):
        at = partial(Violation, line, span.row, span.turn if span.turn >= 0 else None)
        bad, size = None, basis.num_ids(span.source)
        if span.ids and not 0 <= min(span.ids) <= max(span.ids) < size:
            bad = next((i for i, token in enumerate(span.ids) if not 0 <= token < size), None)
        text = f"id {span.ids[bad]} is outside of the vocabulary of {size}" if bad is not None else ""
        ledger.check("vocabulary", None if bad is None else at(token=span.start + bad, problem=text))
        if span.source == "policy":
            _check_reply(ledger, at, record, span, basis)


def _check_reply(ledger: Ledger, at: Callable[..., Violation], record: Record, span: StoredSpan, basis: Basis) -> None:
    assert basis.renderer is not None
    key = b"" if by_endpoint(record) else basis.reply_key(record, span)
    if key in basis.sound_turns:
        ledger.check("stop_token", None)
        ledger.check("reply", None)
        return
    end = _stop_problem(basis.renderer, basis.stops, span, record["turns"][span.turn])
    ledger.check("stop_token", None if end is None else at(token=end[0], problem=end[1]))
    if by_endpoint(record):
        return
    problem = None
    parsed, recorded = basis.reply(record, span), _recorded_reply(record, span.turn, basis)
    if parsed != recorded:
        text = f"the ids parse to {_short(parsed)}; {_short(recorded)} is recorded"
        problem = at(token=span.start, problem=text)
    ledger.check("reply", problem)
    if end is None and problem is None:
        basis.remember(key)


def _stop_problem(
    renderer: Renderer, stops: AbstractSet[int], span: StoredSpan, turn: Record
) -> tuple[int | None, str] | None:
    """Returns the token at which a reply does not end as its turn records, if there is one, and why; None if it does.

    `stops` are the renderer's stop ids.
    """
    ids, ended, stop = span.ids, turn["finish_reason"] == "stop", turn.get("stop", "")
    ends = [] if stops.isdisjoint(ids) else [i for i, token in enumerate(ids) if token in stops]
    if stop and ends != [len(ids) - 1]:
        match = find_stop(ids, [stop], renderer.decode)
        is_at_end = match is not None and match[0] == len(ids)
        return (
            None
            if is_at_end and ended and not ends
            else (None, f"the reply does not end with its stop string {stop!r}")
        )
    if ended and ends[-1:] != [len(ids) - 1]:
        return span.start + len(ids) - 1, "the reply does not end with a stop id"
    if len(ends) > ended:
        return span.start + ends[0], "a stop id is inside the reply"
    return None


def _recorded_reply(record: Record, turn: int, basis: Basis) -> Message:
    try:
        return basis.episode(record).trajectory.turns[turn].message
    except InvalidTrajectory:  # the property `trajectory` reports it
        return message_from_json(record["turns"][turn]["message"])


def _short(message: Message) -> str:
    text = repr((message.content, *message.tool_calls))
    return text if len(text) <= 160 else f"{text[:157]}..."


def _check_tools(ledger: Ledger, line: int, record: Record, basis: Basis) -> None:
    for row, stored in enumerate(record["rows"]):
        digest = stored.get("tools")
        if digest is None:
            continue
        is_known = digest in basis.menus
        problem = "" if is_known else f"tools.jsonl has no tools {digest}"
        if is_known and not basis.has_sound_menu(digest):
            problem = f"the tools under {digest} in tools.jsonl are not those that were shown"
        ledger.check("tools", Violation(line, row, problem=problem) if problem else None)


def _check_prompts(ledger: Ledger, line: int, record: Record, basis: Basis) -> None:
    for row, stored in enumerate(record["rows"]):
        digest = stored.get("tools")
        if basis.renderer is None or "messages" not in stored or (digest is not None and digest not in basis.menus):
            continue
        ids = stored["spans"][0]["ids"]
        try:
            expected_ids = basis.prompt(record, row)
        except RenderError as error:
            ledger.check("prompt", Violation(line, row, problem=f"the recorded messages cannot be rendered: {error}"))
            continue
        problem = None
        if ids != expected_ids:
            text = "the prompt is not the render of the recorded messages and tools"
            problem = Violation(line, row, token=first_difference(ids, expected_ids), problem=text)
        ledger.check("prompt", problem)


def _check_prefix(ledger: Ledger, line: int, record: Record, basis: Basis) -> None:
    renderer, turns = basis.renderer, record["turns"]
    if renderer is None or by_endpoint(record):
        return
    ids: list[int] = []
    for span in basis.spans(record):
        if span.source == "prompt":
            ids = []
        if span.source == "env":
            key = basis.answer_key(record, span, ids)
            problem = None
            if key not in basis.sound_turns:
                problem = _answer_problem(renderer, ids, span.ids, _possible_answers(turns, span.turn))
            if problem is None:
                basis.remember(key)
                ledger.check("prefix", None)
            else:
                token, text = problem
                ledger.check("prefix", Violation(line, span.row, span.turn, span.start + token, text))
        ids.extend(span.ids)


def _answer_problem(
    renderer: Renderer, ids: list[int], answer_ids: list[int], answers: Iterable[Sequence[Message]]
) -> tuple[int, str] | None:
    """Returns the first id of an answer (an index into it) that the render of the record does not have, and why."""
    best = -1
    problem = ""
    for messages in answers:
        try:
            expected_ids = renderer.extend(ids, messages)
        except RenderError as error:
            problem = problem or f"the recorded answer cannot be rendered: {error}"
            continue
        if expected_ids == answer_ids:
            return None
        index = first_difference(answer_ids, expected_ids)
        if index > best:
            recorded_id = f"id {answer_ids[index]}" if index < len(answer_ids) else "the end"
            other = f"id {expected_ids[index]}" if index < len(expected_ids) else "the end"
            best, problem = index, f"{recorded_id} where the render of the recorded answer has {other}"
    return max(best, 0), problem


def _possible_answers(turns: Sequence[Record], index: int) -> Iterable[Sequence[Message]]:
    """Returns what may have answered a turn: the request of the next turn, if the rollout asked it, or the environment.

    The environment's messages themselves are recorded if they are different.
    """
    request = turns[index + 1].get("asked", "") if index + 1 < len(turns) else ""
    if request:
        return [[Message("user", request)]]
    turn = turns[index]
    if turn.get("messages") is not None:
        return [[message_from_json(message) for message in turn["messages"]]]
    return plain_answers(turn["observation"], [ToolResult(**result) for result in turn["tool_results"]])


def _check_turns(ledger: Ledger, line: int, record: Record, _: Basis) -> None:
    has_agent = any(row.get("origin") for row in record["rows"])  # it may have left before it ran all calls of a reply
    for turn, stored in enumerate(record["turns"]):
        calls = [call["id"] for call in stored["message"]["tool_calls"]]
        answered = [result["call_id"] for result in stored["tool_results"]]
        text = f"calls {calls} were answered as {answered}"
        remaining = iter(calls)
        sound = not answered or calls == answered or (has_agent and all(call_id in remaining for call_id in answered))
        ledger.check("tool_answers", None if sound else Violation(line, turn=turn, problem=text))


def _check_outcome(ledger: Ledger, line: int, record: Record, basis: Basis) -> None:
    status, reward = Status(record["status"]), record["reward"]
    problem = f"status {status} with the error {record['error']!r}"
    ledger.check("status", None if (record["error"] is None) == status.trainable else Violation(line, problem=problem))
    problem = ""
    try:
        success = basis.episode(record).trajectory.success
        if success != record["success"]:
            problem = f"success is {record['success']}, and the episode's metrics and info say {success}"
    except InvalidTrajectory as error:
        problem = str(error)
    ledger.check("trajectory", Violation(line, problem=problem) if problem else None)
    rewards = [turn["reward"] for turn in record["turns"]]
    problem = ""
    if not status.trainable:
        problem = "" if reward is None else f"reward {reward} of an episode that failed ({status}); null was wanted"
    elif reward is None or None in rewards:
        problem = f"no reward, though the episode is {status}"
    elif not math.isclose(reward, math.fsum(rewards), rel_tol=1e-9, abs_tol=1e-12):
        problem = f"reward {reward} is not the sum of the turns' rewards, {math.fsum(rewards)}"
    elif record["success"] is None:
        problem = f"success is null, though the episode is {status}"
    ledger.check("reward", Violation(line, problem=problem) if problem else None)


def _check_advantages(ledger: Ledger, line: int, record: Record, basis: Basis) -> None:
    rows = record["advantages"]
    sealed = record.get("credit") == credit_digest([turn["reward"] for turn in record["turns"]], rows)
    text = "a turn's reward or an advantage is not the one that was written"
    ledger.check("credit", None if sealed else Violation(line, problem=text))
    if rows is None:
        ledger.check("advantages", None)
        return
    problem = None
    lengths = [0] * len(record["rows"])
    for span in basis.spans(record):
        lengths[span.row] += len(span.ids) if span.source == "policy" else 0
    if [len(row) for row in rows] != lengths:
        text = f"{[len(row) for row in rows]} advantages a row for {lengths} sampled ids"
        problem = Violation(line, first_difference([len(row) for row in rows], lengths), problem=text)
    elif not all(math.isfinite(sum(row)) or all(map(math.isfinite, row)) for row in rows):
        problem = Violation(line, problem="an advantage is not finite")
    elif not Status(record["status"]).trainable and any(map(any, rows)):
        problem = Violation(line, problem=f"an episode that failed ({record['status']}) has advantages")
    ledger.check("advantages", problem)


CHECKS: tuple[Check, ...] = (
    _check_spans,
    check_once,
    _check_digests,
    _check_samples,
    _check_ids,
    _check_tools,
    _check_prompts,
    _check_prefix,
    _check_turns,
    _check_outcome,
    _check_advantages,
)
