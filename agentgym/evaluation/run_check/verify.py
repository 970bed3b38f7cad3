"""`verify_run`: recomputes from `episodes.jsonl` what can be recomputed, and reports where a record does not hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agentgym.chat_templates.protocol import Renderer
from agentgym.envs.base.opponents import SELF
from agentgym.errors import NOT_JSON, RunFolderError
from agentgym.evaluation.run_check.basis import Basis, Record
from agentgym.evaluation.run_check.record_checks import CHECKS, by_endpoint, lacks_ids
from agentgym.evaluation.run_check.run_checks import (
    EPISODES,
    METRICS,
    NO_DIGESTS,
    ChainCheck,
    RunChecks,
    credit_of,
    max_staleness_of,
    train_settings_of,
)
from agentgym.evaluation.run_check.step_checks import StepChecks
from agentgym.rollout.hosting.gc_pause import young_garbage_only
from agentgym.rollout.record.episodes_file import EpisodeRecord
from agentgym.rollout.record.ledger import Ledger, Property, Violation, first_difference
from agentgym.rollout.record.line_reader import LineReader, find_episodes
from agentgym.rollout.record.stored_fields import NO_EPISODE
from agentgym.rollout.record.tools_file import read_menus
from agentgym.types import JSON

__all__ = [
    "NO_TOKENIZER",
    "PROPERTIES",
    "Property",
    "PropertyVerdict",
    "Recomputation",
    "VerifyReport",
    "Violation",
    "verify_run",
]


PROPERTIES = (
    Property("readable", "every line is one whole episode", "lines"),
    Property("spans", "a row is one prompt, then replies with an answer between each two; one reply a turn", "rows"),
    Property(
        "mask",
        "the stored mask is 1 exactly where the policy emitted an id that is not excluded",
        "rows",
    ),
    Property(
        "once",
        "every sampled id is in one row, trained, or excluded with a reason, and no reply is missing",
        "episodes",
    ),
    Property("digest", "the stored digest is that of the row's ids, sources, logprobs and versions", "rows"),
    Property("logprobs", "each sampled id has one finite logprob of at most 0, and no other id has one", "spans"),
    Property("versions", "each sampled id has one policy version, and it never falls within a branch", "spans"),
    Property("vocabulary", "every id is the tokenizer's, or that of the model that sampled it", "spans", True),
    Property("tools", "the tools that a row names are recorded, as they were shown", "rows"),
    Property(
        "prompt", "a row's prompt is the render of its messages and tools, or what it shares and the rest", "rows", True
    ),
    Property("first_prompt", "episodes of one task begin with the same prompt ids", "episodes"),
    Property("prefix", "each prompt is the ids before it and the render of the recorded answer", "answers", True),
    Property("stop_token", "a reply ends with its one stop id or string, or was cut and has none", "replies", True),
    Property("reply", "the ids of a reply parse to the recorded message", "replies", True),
    Property(
        "tool_answers", "every call id has one result, in call order; an agent may leave before the last", "turns"
    ),
    Property("status", "an episode names its error exactly when it failed", "episodes"),
    Property("trajectory", "the line reads back as a trajectory, whose invariants hold", "episodes"),
    Property("reward", "the reward is the sum over the turns, and null exactly when the episode failed", "episodes"),
    Property("advantages", "one finite advantage per sampled id, none other than 0 for a failed episode", "episodes"),
    Property("credit", "the stored digest is that of the turns' rewards and the advantages", "episodes"),
    Property("groups", "a group has one task, and each of its members once", "groups"),
    Property("metrics", "counts and means of metrics.jsonl follow from the episodes of their step", "steps"),
    Property("chain", "each line has the digest of itself and of the line before", "lines"),
    Property("settings", "config.yaml is the one that the run began with", "digests"),
    Property("checkpoints", "each has the files of its manifest, and is of its step and of this run", "checkpoints"),
    Property("end", "the files end with what the run ended with", "files"),
    Property("report", "report.html is as it was written", "pages"),
)


UNCHECKED = {
    "chain": "the run was recorded by an earlier version, whose lines have no digests",
    "settings": "no checkpoint and no digests.json has the digest of config.yaml",
    "checkpoints": "there are none",
    "end": NO_DIGESTS,
    "report": "there is no report.html with a digest",
}
"""The reasons why nothing was checked, by property."""
NO_TOKENIZER = "it needs the model's tokenizer (--tokenizer FOLDER)"
BY_ENDPOINT = ("prompt", "prefix", "reply")
"""The properties of this package's own rendering and parsing."""


@dataclass(frozen=True, slots=True)
class PropertyVerdict:
    """The result for one property; `first` is the first place where it does not hold, None if it holds."""

    about: Property
    num_checked: int
    num_failed: int
    first: Violation | None
    skipped: str | None = None
    """The reason why nothing was checked, if so."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """The number of unchecked units by reason, if others were checked."""

    @property
    def ok(self) -> bool:
        """True if there was no failure; a skipped property is ok, and the report lists it as skipped."""
        return self.num_failed == 0

    def line(self) -> str:
        """Returns the verdict as one line of text."""
        head = f"{'ok' if self.ok else 'FAILED':<6} {self.about.name:<12} "
        if self.skipped:
            return f"{'-':<6} {self.about.name:<12} not checked: {self.skipped}"
        left_out = "".join(f"; {number} not checked: {reason}" for reason, number in self.left_out.items())
        if self.first is None:
            return f"{head} {self.num_checked} {self.about.unit}: {self.about.meaning}{left_out}"
        return f"{head} {self.num_failed} of {self.num_checked} {self.about.unit}; first: {self.first}{left_out}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The verdicts on one run, one per entry of `PROPERTIES` and then of what was recomputed, in their order."""

    path: Path
    num_episodes: int
    num_tokens: int
    verdicts: tuple[PropertyVerdict, ...]
    num_without_ids: int = 0
    """The number of episodes without token ids: left out (record.tokens), or played by an endpoint without them."""
    digest: str | None = None
    """The digest of the whole run; None if the run has not ended, or is not as it was written."""

    @property
    def ok(self) -> bool:
        """True if every checked property holds."""
        return all(verdict.ok for verdict in self.verdicts)

    def lines(self) -> list[str]:
        """Returns the report as text, with a line for each property and a last one for the outcome."""
        failed = [verdict.about.name for verdict in self.verdicts if not verdict.ok]
        outcome = f"not sound: {', '.join(failed)}" if failed else "sound"
        end = f"{self.path}: {self.num_episodes} episodes, {self.num_tokens} tokens: {outcome}"
        without = (
            f"{self.num_without_ids} of {self.num_episodes} episodes hold no token ids (record.tokens false, or a chat "
            "endpoint that returns none): only what was said and rewarded was checked; they cannot be trained on"
        )
        notes = [without] if self.num_without_ids else []
        notes += [f"run digest {self.digest}"] if self.digest else []
        return [*(verdict.line() for verdict in self.verdicts), *notes, end]

    def to_json(self) -> dict[str, JSON]:
        """Returns the report as a JSON object: `ok`, counts, and `properties` by name."""
        return {
            "ok": self.ok,
            "num_episodes": self.num_episodes,
            "num_tokens": self.num_tokens,
            "num_without_ids": self.num_without_ids,
            "digest": self.digest,
            "properties": {
                verdict.about.name: {
                    "ok": verdict.ok,
                    "num_checked": verdict.num_checked,
                    "num_failed": verdict.num_failed,
                    "first": None if verdict.first is None else verdict.first.to_json(),
                    "skipped": verdict.skipped,
                    "left_out": dict(verdict.left_out),
                }
                for verdict in self.verdicts
            },
        }


class Recomputation(Protocol):
    """Recomputes a property of a run, from the models, environments and estimators that made it."""

    properties: tuple[Property, ...]

    def add(self, ledger: Ledger, line: int, record: EpisodeRecord) -> None:
        """Adds the next episode of the run, on a line of `episodes.jsonl`."""

    def close(self, ledger: Ledger) -> None:
        """Checks what needs all episodes."""


def verify_run(
    run: Path,
    renderer: Renderer | None = None,
    recomputations: Sequence[Recomputation] = (),
    *,
    lacking: str = NO_TOKENIZER,
) -> VerifyReport:
    """Checks `PROPERTIES` of a run, on every line and on all of its files, and reports its damage.

    `renderer` is the one with which the run was made; without it the properties that need one are skipped, for the
    reason `lacking`. `recomputations` check further properties of the same episodes. Raises RunFolderError only if
    there is no episode file to read, or nothing in it.
    """
    path = _episodes_of(run)
    ledger = Ledger()
    settings = train_settings_of(run)
    basis = Basis(renderer, read_menus(run), max_staleness_of(settings), credit_of(settings))
    across, steps = _Across(), StepChecks()
    chains = {name: ChainCheck(name) for name in (EPISODES, METRICS)}
    whole = RunChecks(run, ledger, chains)
    counts = _Counts()
    with basis.remember_texts(), young_garbage_only():
        for line, record in _records(path, ledger, chains[EPISODES]):
            counts.episodes += 1
            try:
                counts.add(record, basis)
                for check in CHECKS:
                    check(ledger, line, record, basis)
                across.add(ledger, line, record)
                steps.add(record)
                for recomputation in recomputations:
                    recomputation.add(ledger, line, basis.episode(record))
            except NO_EPISODE as error:
                # The line is JSON and yet no episode: that is a finding, not a reason to crash.
                ledger.fail("readable", Violation(line, problem=f"this is no episode: {type(error).__name__}: {error}"))
    across.close(ledger)
    for line, raw in _lines(run / METRICS):
        chains[METRICS].add(ledger, line, raw)
        whole.add_step(raw)
        steps.check(ledger, line, raw)
    if basis.max_staleness is not None:
        steps.close(ledger)
    whole.close()
    for recomputation in recomputations:
        recomputation.close(ledger)
    properties = (*PROPERTIES, *(entry for recomputation in recomputations for entry in recomputation.properties))
    lacking = lacking if renderer is None else ""
    verdicts = tuple(_verdict(entry, ledger, lacking, counts.is_served) for entry in properties)
    return VerifyReport(run, counts.episodes, counts.tokens, verdicts, counts.without_ids, whole.digest)


@dataclass(slots=True)
class _Counts:
    """The numbers of the records so far."""

    episodes: int = 0
    tokens: int = 0
    without_ids: int = 0
    is_served: bool = False
    """True if a chat endpoint played an episode."""

    def add(self, record: Record, basis: Basis) -> None:
        self.tokens += sum([len(span.ids) for span in basis.spans(record)])
        if by_endpoint(record):
            self.is_served = True
        if by_endpoint(record) or lacks_ids(record):
            self.without_ids += bool(record["turns"] and not record["rows"])


def _episodes_of(run: Path) -> Path:
    """Returns the episode file of a run; raises RunFolderError if there is none, or nothing in it and no step either.

    A run of `sft` or `dpo` that played no evaluation has steps and no episodes.
    """
    path = find_episodes(run)
    if path is None:
        what = "has no episodes.jsonl" if run.is_dir() else "is not a folder"
        raise RunFolderError(f"{run} {what}; the folder of a run that has played episodes was wanted: check --output")
    if path.stat().st_size == 0 and next(_lines(run / METRICS), None) is None:
        raise RunFolderError(f"{path} is empty; recorded episodes were wanted: wait for the run's first step")
    return path


def _verdict(entry: Property, ledger: Ledger, lacking: str, is_served: bool) -> PropertyVerdict:
    tally = ledger.tally(entry.name)
    skipped = None
    if entry.name in BY_ENDPOINT and is_served and tally.num_checked == 0:
        skipped = "a chat endpoint rendered the prompts and parsed the replies itself"
    elif entry.needs_renderer and lacking:
        skipped = lacking
    elif tally.num_checked == 0:
        skipped = "; ".join(tally.skipped) or UNCHECKED.get(entry.name, f"there are no {entry.unit} to check")
    return PropertyVerdict(entry, tally.num_checked, tally.num_failed, tally.first, skipped, tally.skipped)


def _records(path: Path, ledger: Ledger, chain: ChainCheck) -> Iterator[tuple[int, Record]]:
    """Yields the line number and object of each line that can be read."""
    for line, raw in _lines(path):
        chain.add(ledger, line, raw)
        try:
            record = json.loads(raw)
        except NOT_JSON as error:
            torn = "" if raw.endswith(b"\n") else " (the line is torn: the run was cut short, or still writes)"
            ledger.check("readable", Violation(line, problem=f"not JSON: {error}{torn}"))
            continue
        is_object = isinstance(record, dict)
        ledger.check("readable", None if is_object else Violation(line, problem="a JSON object was wanted"))
        if is_object:
            yield line, record


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file, counted from 1; none if there is no such file."""
    if path.is_file():
        with LineReader(path) as lines:
            yield from enumerate(lines, 1)


_sorted_json = json.JSONEncoder(sort_keys=True).encode


@dataclass(slots=True)
class _Group:
    line: int
    task: str
    members: dict[int, int] = field(default_factory=dict)
    problem: Violation | None = None


class _Across:
    """The checks across episodes: groups, and prompts that have to be equal."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int, str], _Group] = {}
        self._prompts: dict[str, tuple[int, list[int]]] = {}
        self._failed_lines: set[int] = set()

    def add(self, ledger: Ledger, line: int, record: Record) -> None:
        task = _sorted_json(record["task"])
        key = (record["phase"], record["step"], record["group"])
        group = self._groups.setdefault(key, _Group(line, task))
        member = record["member"]
        if group.problem is None and task != group.task:
            problem = f"group {key[2]!r} of step {key[1]} has another task on line {group.line}"
            group.problem = Violation(line, problem=problem)
        if group.problem is None and member in group.members and group.members[member] not in self._failed_lines:
            problem = f"member {member} of group {key[2]!r} is on line {group.members[member]} already"
            group.problem = Violation(line, problem=problem)
        group.members[member] = line
        if record["reward"] is None:
            self._failed_lines.add(line)  # a resumed evaluation plays it again
        is_plain = record["task"]["kwargs"].get("opponent") != SELF  # in self-play others may have moved before
        if record["rows"] and is_plain and record["rows"][0].get("origin") is None:
            self._compare_prompt(ledger, line, task, record["rows"][0]["spans"][0]["ids"])

    def _compare_prompt(self, ledger: Ledger, line: int, task: str, ids: list[int]) -> None:
        other_line, other = self._prompts.setdefault(task, (line, ids))
        if other_line == line:
            return
        text = f"the prompt differs from that of line {other_line}, an episode of the same task"
        violation = None if ids == other else Violation(line, row=0, token=first_difference(ids, other), problem=text)
        ledger.check("first_prompt", violation)

    def close(self, ledger: Ledger) -> None:
        for (_, _, name), group in self._groups.items():
            missing = sorted(set(range(len(group.members))) - set(group.members))
            violation = group.problem
            if violation is None and missing:
                violation = Violation(group.line, problem=f"group {name!r} lacks member {missing[0]}")
            ledger.check("groups", violation)
