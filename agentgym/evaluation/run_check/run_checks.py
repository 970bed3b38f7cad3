"""The checks of a run's files as a whole: digests from line to line, checkpoints, and the state at the run's end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from agentgym.errors import RunFolderError
from agentgym.rollout.record.chain import GENESIS, line_digest, split_line
from agentgym.rollout.record.folder_digests import DIGESTS, file_digest, page_problem, read_digests
from agentgym.rollout.record.ledger import Ledger, Violation
from agentgym.rollout.record.manifest import MANIFEST, what_is_torn
from agentgym.types import JSON
from agentgym.yaml_text import parse_yaml

__all__ = ["ChainCheck", "RunChecks", "credit_of", "max_staleness_of", "train_settings_of"]

EPISODES, METRICS, CONFIG = "episodes.jsonl", "metrics.jsonl", "config.yaml"
NO_DIGESTS = f"there is no {DIGESTS}: the run goes on, was killed, or is of an earlier version"


class ChainCheck:
    """Checks the property `chain` line by line; `head` is the digest of the last line."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.head = GENESIS
        self.lines: dict[str, int] = {}
        """The line numbers by digest."""

    def add(self, ledger: Ledger, line: int, raw: bytes) -> None:
        """Checks the next line of the file. Lines of an earlier version, which had no digests, may come first."""
        body, digest = split_line(raw)
        if digest is None:
            if self.lines:
                self._check(ledger, line, "the line has no digest, and lines before it have one")
            return
        problem = "" if digest == line_digest(self.head, body) else "the line, or the one before it, is not as written"
        self._check(ledger, line, problem)
        self.head = digest  # so that one defect is counted once
        self.lines[digest] = line

    def _check(self, ledger: Ledger, line: int, problem: str) -> None:
        where = "" if self.file == EPISODES else f"of {self.file}: "
        ledger.check("chain", Violation(line, problem=where + problem) if problem else None)


class RunChecks:
    """Checks what a single line cannot show, after all lines were read; `chains` are those of the files by name."""

    def __init__(self, run: Path, ledger: Ledger, chains: Mapping[str, ChainCheck]) -> None:
        self._run, self._ledger, self._chains = run, ledger, chains
        self._steps: dict[str, int] = {}
        self.digest: str | None = None
        """The digest of the whole run, once `close` has found it to be as written."""

    def add_step(self, raw: bytes) -> None:
        """Adds a line of `metrics.jsonl`, from which a checkpoint's place in it is known."""
        digest = split_line(raw)[1]
        try:
            step = json.loads(raw)["step"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return  # it fails the property `metrics`
        if digest is not None and isinstance(step, int):
            self._steps[digest] = step

    def close(self) -> None:
        """Checks the properties `settings`, `checkpoints`, `end` and `report`."""
        digests: Mapping[str, str] = {}
        try:
            stored_digests = read_digests(self._run)
            digests = stored_digests or {}
        except RunFolderError as error:
            self._check("end", str(error))
        self._check_end(digests)
        self._check_settings(digests.get(CONFIG), DIGESTS)
        for folder in sorted(self._run.glob("checkpoints/step-*")):
            if folder.is_dir():
                name = f"checkpoints/{folder.name}"
                problem = self._checkpoint_problem(folder, digests.get(f"{name}/{MANIFEST}"))
                self._check("checkpoints", f"{name}: {problem}" if problem else "")
        self._check_report()
        sound = all(self._ledger.tally(name).num_failed == 0 for name in ("chain", "end", "settings", "checkpoints"))
        self.digest = digests.get("run") if sound else None

    def _check(self, name: str, problem: str) -> None:
        self._ledger.check(name, Violation(None, problem=problem) if problem else None)

    def _check_end(self, digests: Mapping[str, str]) -> None:
        for name, digest in digests.items():
            if name in self._chains:
                self._check("end", self._end_problem(self._chains[name], digest))
            elif name.endswith(".json") and "/" not in name:
                self._check("end", _file_problem(self._run / name, digest))

    def _end_problem(self, chain: ChainCheck, digest: str) -> str:
        if chain.head == digest:
            return ""
        if not any(self._run.glob(f"{chain.file}*")):
            return f"{chain.file} is missing"
        if digest in chain.lines:
            return f"{chain.file} has lines after line {chain.lines[digest]}, with which the run ended"
        return f"{chain.file} does not end with the line that the run ended with: its end is lost or edited"

    def _check_settings(self, digest: str | None, source: str) -> None:
        if digest is not None:
            problem = _file_problem(self._run / CONFIG, digest)
            self._check("settings", f"{problem} ({source} has its digest)" if problem else "")

    def _checkpoint_problem(self, folder: Path, digest: str | None) -> str:
        if torn := what_is_torn(folder):
            return torn
        if digest is not None and (problem := _file_problem(folder / MANIFEST, digest)):
            return problem
        manifest = json.loads((folder / MANIFEST).read_bytes())
        step = int(folder.name.removeprefix("step-"))
        if manifest.get("step") != step:
            return f"it is the checkpoint of step {manifest.get('step')}"
        record: JSON = manifest.get("record") or {}
        if not record:
            return ""
        if not isinstance(record, Mapping):
            return f"{MANIFEST} holds no digests"
        self._check_settings(str(record.get(CONFIG)), f"checkpoints/{folder.name}")
        if str(record.get(EPISODES)) not in (GENESIS, *self._chains[EPISODES].lines):
            return f"it was written after other episodes than those of {EPISODES}"
        if (step_at := self._steps.get(str(record.get(METRICS)))) != step:
            what = "no line" if step_at is None else f"the line of step {step_at}"
            return f"it was written after a line of {METRICS} that is {what} there"
        return ""

    def _check_report(self) -> None:
        path = self._run / "report.html"
        if not path.is_file():
            return
        problem = page_problem(path.read_bytes())
        if problem is not None:
            self._check("report", f"report.html: {problem}" if problem else "")


def train_settings_of(run: Path) -> Mapping[str, object]:
    """Returns the settings of a training run, by its config.yaml; none for other folders."""
    path = run / CONFIG
    try:
        settings = parse_yaml(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError:
        return {}  # the property `settings` reports it
    return {"max_staleness": 0, **settings} if isinstance(settings, dict) and "algo" in settings else {}


def max_staleness_of(settings: Mapping[str, object]) -> int | None:
    """Returns the setting `max_staleness` of a training run; None for other folders."""
    staleness = settings.get("max_staleness")
    return staleness if isinstance(staleness, int) else None


def credit_of(settings: Mapping[str, object]) -> frozenset[str] | None:
    """Returns the labels of the branches that a training run trains (agent.credit); None if that is not known."""
    agent = settings.get("agent")
    labels = agent.get("credit") if isinstance(agent, Mapping) else None
    return frozenset(map(str, labels)) if isinstance(labels, list | tuple) else None


def _file_problem(path: Path, digest: str) -> str:
    """Returns why a file is not the one with the digest; "" if it is."""
    if not path.is_file():
        return f"{path.name} is missing"
    return "" if file_digest(path) == digest else f"{path.name} is not as it was written"
