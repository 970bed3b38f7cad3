"""Each check of `check_env` finds what it is for, told by its name, and holds nobody to what was not claimed."""

from __future__ import annotations

import copy
import random
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentgym.envs import Difficulty, EnvCard, Script, ScriptedPolicy, Text, TextEnv, ToolEnv
from agentgym.envs.base.cheater import Trickster, tool_call_reply
from agentgym.envs.base.tool_env import UNPAID
from agentgym.testing import Verdict, check_env, examine_env
from agentgym.tools import tool
from agentgym.types import Message, ToolResult, ToolSpec

CARD = EnvCard(
    task="Say the code.",
    tools=("say",),
    reward="1 for the code.",
    difficulty=Difficulty(values={1: "a code", 2: "the same"}),
    oracle="knows the code",
    cheat="claims",
    baseline={"random": 0.0},
    licence="Apache-2.0",
)


class Fair(ToolEnv):
    """Says whether a code is right."""

    card: EnvCard | None = CARD
    system_prompt = "Say the code."
    runs_inline = True
    max_turns = 3

    def __init__(self, render_mode: str | None = None, *, level: int = 1) -> None:
        super().__init__(render_mode)
        self.level = level

    def start(self, options: dict[str, Any]) -> str:
        self.code = str(self.np_random.integers(10**6, 10**7))
        return f"Room {self.np_random.integers(10**6)}."

    @tool
    def say(self, code: str) -> str:
        """Says a code."""
        if code == self.code:
            self.end(success=True, reward=1.0)
            return f"{self.code} is the code."
        return f"{code!r} is not the code."

    def secrets(self) -> tuple[str, ...]:
        return (self.code,)

    def make_oracle(self) -> Any:
        return Knowing()

    def make_cheat(self) -> Any:
        return Trickster("say", lambda env: [tool_call_reply("say", code="")])


class Knowing:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self.env: Any = env.unwrapped

    def act(self, observation: str) -> Message:
        return tool_call_reply("say", code=self.env.code)


class Copied(TextEnv):
    """An environment with a fork."""

    max_turns = 6
    system_prompt = "Talk."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.lines = [str(self.np_random.integers(10**6))]
        return self.lines[0], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.lines.append(action)
        return f"{len(self.lines)} {self.np_random.integers(10**6)}", 0.0, False, False, {}

    def fork(self) -> TextEnv:
        return copy.deepcopy(self)


def verdicts(env: Any) -> dict[str, Verdict]:
    return {verdict.check: verdict for verdict in examine_env(env)}


def verdict_of(env: Any, check: str) -> Verdict:
    (verdict,) = examine_env(env, only=[check])
    return verdict


def test_a_fair_environment_passes_every_check_it_claims() -> None:
    reports = verdicts(Fair)
    assert {name for name, verdict in reports.items() if verdict.verdict == "not claimed"} == {
        "another process",
        "fork",
    }
    assert {verdict.verdict for verdict in reports.values()} == {"passed", "not claimed"}
    assert verdict_of(Copied, "fork").verdict == "passed"


def test_unclaimed_checks_are_reported_as_not_claimed() -> None:
    reports = verdicts(Copied)
    unclaimed = {"tool schemas", "arguments against the schema", "card", "oracle", "cheat", "canaries", "baseline"}
    unclaimed |= {"reward range", "answer leak", "another process", "raising tools"}
    assert {name for name, verdict in reports.items() if verdict.verdict == "not claimed"} == unclaimed
    assert all(reports[name].not_claimed for name in unclaimed)


# ---- seeds and what is left behind


class DrawsGlobally(Fair):
    def start(self, options: dict[str, Any]) -> str:
        return f"{super().start(options)} {random.random()}"


class SeedsGlobally(Fair):
    def start(self, options: dict[str, Any]) -> str:
        random.seed(0)
        return f"{super().start(options)} {random.random()}"


class SharedState(Fair):
    codes: list[str] = []

    def start(self, options: dict[str, Any]) -> str:
        opening = super().start(options)
        self.codes[:] = [opening]
        return opening

    @tool
    def say(self, code: str) -> str:
        """Says a code."""
        return f"Not here: {self.codes[0]}"


class Remembers(Fair):
    played = 0

    def start(self, options: dict[str, Any]) -> str:
        self.played += 1
        return f"{super().start(options)} Episode {self.played}."


class GrowingMenu(Fair):
    def start(self, options: dict[str, Any]) -> str:
        def more() -> str:
            """Gives more."""
            return "more"

        more.__name__ = f"more_{len(self.tools)}"
        self.add_tool(more)
        return super().start(options)


class ForkIsSelf(Copied):
    def fork(self) -> TextEnv:
        return self


class ForkForgets(Copied):
    def fork(self) -> TextEnv:
        clone = copy.deepcopy(self)
        clone.lines = []
        return clone


RESOURCES: list[Any] = []


class KeepsFile(Fair):
    def start(self, options: dict[str, Any]) -> str:
        RESOURCES.append(open("/dev/null"))  # noqa: SIM115  # what it is here for
        return super().start(options)


class KeepsThread(Fair):
    def start(self, options: dict[str, Any]) -> str:
        event = threading.Event()
        threading.Thread(target=event.wait, name="left-behind", daemon=True).start()
        RESOURCES.append(event)
        return super().start(options)


class KeepsProcess(Fair):
    def start(self, options: dict[str, Any]) -> str:
        RESOURCES.append(subprocess.Popen(["sleep", "60"]))
        return super().start(options)


class KeepsFolder(Fair):
    def start(self, options: dict[str, Any]) -> str:
        tempfile.mkdtemp(prefix="left-behind")
        return super().start(options)


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for what the checks before leave in it
    yield
    for resource in RESOURCES:
        if isinstance(resource, threading.Event):
            resource.set()
        elif isinstance(resource, subprocess.Popen):
            resource.kill()
            resource.wait()
        else:
            resource.close()
    RESOURCES.clear()


@pytest.mark.long
@pytest.mark.parametrize(
    ("env", "check", "seen"),
    [
        (DrawsGlobally, "global random state", "draws from or seeds"),
        (SeedsGlobally, "global random state", "draws from or seeds"),
        (SharedState, "side by side", "of 32 episodes in threads"),
        (Remembers, "identical starts", "another first observation"),
        (GrowingMenu, "identical starts", "another tools"),
        (ForkIsSelf, "fork", "fork() gives no new environment"),
        (ForkForgets, "fork", "a fork plays otherwise"),
        (KeepsFile, "close releases", "2 open files"),
        (KeepsThread, "close releases", "threads: left-behind"),
        (KeepsProcess, "close releases", "processes: sleep"),
        (KeepsFolder, "close releases", "temporary files: left-behind"),
    ],
)
def test_what_an_episode_depends_on_or_leaves_is_found(env: type[TextEnv], check: str, seen: str) -> None:
    verdict = verdict_of(env, check)
    assert verdict.verdict == "failed"
    assert seen in verdict.findings[0].message


HASHED = '''
from agentgym.envs import TextEnv


class Hashed(TextEnv):
    """Shows what differs from process to process."""

    max_turns = 2
    system_prompt = "Talk."

    def reset(self, *, seed=None, options=None):
        return f"{HASH} {self.np_random.integers(1000)}", {}

    def step(self, action):
        return "Yes?", 0.0, False, False, {}
'''


@pytest.mark.parametrize(("code", "verdict"), [("{hash('key')}", "failed"), ("key", "passed")])
def test_another_process_plays_the_same_episode(code: str, verdict: str, tmp_path: Path) -> None:
    path = tmp_path / "hashed.py"
    path.write_text(HASHED.replace("{HASH}", code))
    assert verdict_of(f"{path}:Hashed", "another process").verdict == verdict


# ---- tools


class NoSchema(Copied):
    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        return (ToolSpec("say", "Says.", {"type": "nonsense"}), ToolSpec("add", "Adds.", {"type": "array"}))


SAY = ToolSpec("say", "Says.", {"type": "object", "properties": {"code": {"type": "integer"}}, "required": ["code"]})


class Unchecked(Copied):
    """Answers every call, and looks at none of its arguments."""

    paid = 0.0
    error: str | None = None

    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        return (SAY,)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        calls = getattr(action, "tool_calls", ())
        results = tuple(ToolResult(call.id, "say", "Well.", self.error) for call in calls)
        messages = tuple(Message("tool", "Well.", tool_call_id=call.id, name="say") for call in calls)
        info: dict[str, Any] = {"tool_results": results, "messages": messages} if calls else {}
        return "Well.", self.paid, False, False, info


class RaisesOnArguments(Unchecked):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        for call in getattr(action, "tool_calls", ()):
            call.arguments["code"]
        return super().step(action)


class PaysAnyCall(Unchecked):
    paid = 1.0


class Unanswered(Copied):
    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        return (SAY,)


class RefusesAll(Unchecked):
    error = "invalid_arguments"


@pytest.mark.parametrize(
    ("env", "check", "seen"),
    [
        (NoSchema, "tool schemas", "are no JSON Schema"),
        (Unchecked, "arguments against the schema", "is run: 'Well.'"),
        (RaisesOnArguments, "arguments against the schema", "step raised KeyError"),
        (PaysAnyCall, "arguments against the schema", "pays 1"),
        (Unanswered, "arguments against the schema", "answered by no tool result"),
        (RefusesAll, "arguments against the schema", "fits its schema, and is refused"),
    ],
)
def test_schemas_are_valid_and_honoured(env: type[TextEnv], check: str, seen: str) -> None:
    report = verdict_of(env, check)
    assert report.verdict == "failed"
    assert seen in report.findings[0].message
    if env is NoSchema:
        assert "an object" in report.findings[1].message


# ---- spaces and turns


class SmallSpace(Copied):
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.action_space = Text(max_length=2)


class EverLonger(Copied):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.max_turns = (self.max_turns or 0) + 1
        return super().step(action)


def test_replies_are_in_the_action_space() -> None:
    assert "is not in the action_space" in verdict_of(SmallSpace, "spaces").findings[0].message


def test_a_turn_limit_is_kept() -> None:
    assert "max_turns is 6, and the episode goes on" in verdict_of(EverLonger, "no turn limit").findings[0].message


# ---- the card


def with_card(**changes: Any) -> EnvCard:
    fields = {name: getattr(CARD, name) for name in CARD.__dataclass_fields__}
    return EnvCard(**{**fields, **changes})


class OtherTools(Fair):
    card = with_card(tools=("say", "shout"))


class NoDifficulty(Fair):
    card = with_card(difficulty=Difficulty(keyword="lvl", values={1: "easy"}))


class UntoldCheat(Fair):
    card = with_card(cheat="")


class BadOracle(Fair):
    def make_oracle(self) -> Any:
        return self.make_cheat()


class BrokenCall(Fair):
    def make_oracle(self) -> Any:
        return ScriptedPolicy(self.solve)

    def solve(self, observation: str) -> Script:
        while True:
            yield "say", {"number": 7}


class BadOracleLater(Fair):
    def make_oracle(self) -> Any:
        return self.make_cheat() if self.level == 2 else Knowing()


class UnpaidOracle(Fair):
    @tool
    def say(self, code: str) -> str:
        """Says a code."""
        if code == self.code:
            self.end(success=True, reward=0.5)
        return "Well."


class UnpaidSuccess(Fair):
    @tool
    def say(self, code: str) -> str:
        """Says a code."""
        self.end(success=code == self.code)
        return "Well."


class RaisesWhenWon(Fair):
    @tool
    def say(self, code: str) -> str:
        """Says a code."""
        if code == self.code:
            self.end(success=True, reward=1.0)
            raise KeyError("nope")
        return "Well."


class RaisesByAccident(Fair):
    @tool
    def say(self, code: str) -> str:
        """Says a code."""
        if code == self.code:
            return code[len(code)]
        return "Well."


class GoodCheat(Fair):
    def make_cheat(self) -> Any:
        return Knowing()


class PaysSilence(Fair):
    def on_message(self, text: str) -> str:
        self.reward = float(not text)
        return "Well."


class PaysEcho(Fair):
    def on_message(self, text: str) -> str:
        self.reward = float(text.startswith("Room"))
        return "Well."


class PaysWords(Fair):
    def on_message(self, text: str) -> str:
        self.reward = float("Room" in text.split() and "." not in text)
        return "Well."


class PaysCalls(Fair):
    @tool
    def say(self, code: str) -> str:
        """Says a code."""
        self.reward += 0.01
        return "Well."


class BelievesVerdicts(Fair):
    @tool
    def say(self, code: str) -> str:
        """Says a code."""
        self.reward = float("success" in code)
        return "Well."


class LuckyRandom(Fair):
    card = with_card(baseline={"random": 0.9})


class PaysTooMuch(Fair):
    @tool
    def say(self, code: str) -> str:
        """Says a code."""
        self.end(success=code == self.code, reward=2.0 if code == self.code else 0.0)
        return "Well."


class PaysNothingNumber(Fair):
    def on_message(self, text: str) -> str:
        self.reward = float("nan")
        return "Well."


@pytest.mark.parametrize(
    ("env", "check", "seen"),
    [
        (OtherTools, "card", "names the tools say, shout; there are say"),
        (NoDifficulty, "card", "lvl"),
        (UntoldCheat, "card", "there is a cheat (make_cheat), and the card does not say"),
        (BadOracle, "oracle", "does not score 1: reward 0, success 0 at seed 0"),
        (BadOracleLater, "oracle", "with level=2"),
        (BrokenCall, "oracle", """{"number": 7}} </tool_call> was answered "invalid arguments for say: missing"""),
        (UnpaidOracle, "oracle", "reward 0.5, success 1"),
        (UnpaidSuccess, "oracle", UNPAID),
        (RaisesWhenWon, "oracle", "'nope' after self.end(success=True)"),
        (RaisesByAccident, "oracle", "string index out of range; no argument explains that"),
        (GoodCheat, "cheat", "scores above 0: reward 1"),
        (PaysSilence, "canaries", "'empty'"),
        (PaysEcho, "canaries", "'echo'"),
        (PaysWords, "canaries", "'random text'"),
        (PaysCalls, "canaries", "'tool spam'"),
        (BelievesVerdicts, "canaries", "'injection'"),
        (LuckyRandom, "baseline", "the card says that random scores 0.9; over 60 tasks it scores 0.000"),
        (PaysTooMuch, "reward range", "oracle earns 2 at seed 0, out of the card's 0 to 1"),
        (PaysNothingNumber, "reward range", "not a finite number"),
    ],
)
def test_a_card_is_held_to(env: type[TextEnv], check: str, seen: str) -> None:
    verdict = verdict_of(env, check)
    assert verdict.verdict == "failed"
    assert any(seen in finding.message for finding in verdict.findings)


# ---- the answer


class LeaksAtOnce(Fair):
    def start(self, options: dict[str, Any]) -> str:
        return f"{super().start(options)} Not {self.code}."


class LeaksInPrompt(Fair):
    def start(self, options: dict[str, Any]) -> str:
        opening = super().start(options)
        self.system_prompt = f"Say the code {self.code}."
        return opening


class LeaksInAnswer(Fair):
    def on_message(self, text: str) -> str:
        return f"Say it: {self.code}!"


class LeaksInMetrics(Fair):
    @tool
    def say(self, code: str) -> str:
        """Says a code."""
        self.metrics["code"] = int(self.code)
        return "Well."


@pytest.mark.parametrize(
    ("env", "place"),
    [
        (LeaksAtOnce, "observation"),
        (LeaksInPrompt, "system prompt"),
        (LeaksInAnswer, "observation"),
        (LeaksInMetrics, "info['metrics']"),
    ],
)
def test_a_leak_of_the_answer_is_found(env: type[TextEnv], place: str) -> None:
    verdict = verdict_of(env, "answer leak")
    assert verdict.verdict == "failed"
    assert f"is in the {place} before the episode ends" in verdict.findings[0].message


class ShowsOnRequest(Fair):
    """Its answer is found by a call that only an oracle makes."""

    card = None

    @tool
    def look(self, room: int) -> str:
        """Looks into a room."""
        return self.code if room == self.room else "Nothing."

    def start(self, options: dict[str, Any]) -> str:
        super().start(options)
        self.room = int(self.np_random.integers(10**6))
        return f"The code is in room {self.room}."

    def make_oracle(self) -> Any:
        return ScriptedPolicy(self.solve)

    def solve(self, observation: str) -> Script:
        code = yield "look", {"room": self.room}
        yield "say", {"code": code}


class LeavesOutWhatIsShown(ShowsOnRequest):
    is_shown = False

    @tool
    def look(self, room: int) -> str:
        """Looks into a room."""
        self.is_shown = room == self.room
        return super().look(room)

    def secrets(self) -> tuple[str, ...]:
        return () if self.is_shown else super().secrets()


def test_an_oracle_without_a_card_finds_what_a_tool_shows() -> None:
    verdict = verdict_of(ShowsOnRequest, "answer leak")
    assert verdict.verdict == "failed" and "(oracle, seed 0)" in verdict.findings[0].message
    assert verdict_of(LeavesOutWhatIsShown, "answer leak").verdict == "passed"


class BrokenOracle(Fair):
    """Its oracle names an argument that does not exist."""

    def make_oracle(self) -> Any:
        return ScriptedPolicy(self.solve)

    def solve(self, observation: str) -> Script:
        answer = yield "say", {"number": self.code}
        yield "say", {"code": next(word for word in answer.split() if word == self.code)}


def test_an_oracle_that_raises_is_shown_with_its_line_and_what_it_was_answered() -> None:
    (finding,) = verdict_of(BrokenOracle, "oracle").findings
    line = BrokenOracle.solve.__code__.co_firstlineno + 2
    assert f"BrokenOracle.solve raised StopIteration ({__file__}, line {line})" in finding.message
    assert "the observation before it: \"invalid arguments for say: missing argument 'code'" in finding.message
    assert "policies.py" not in finding.message


class TellsAtTheEnd(Fair):
    """What a player said is no leak, nor what is told when all is over."""

    @tool
    def say(self, code: str) -> str:
        """Says a code."""
        self.end(success=code == self.code, reward=float(code == self.code))
        return f"You said {code}, it was {self.code}."


def test_the_end_may_tell_the_answer() -> None:
    assert verdict_of(TellsAtTheEnd, "answer leak").verdict == "passed"


def test_check_env_gives_the_findings_of_all_checks() -> None:
    assert [finding.check for finding in check_env(LeaksInPrompt)] == ["answer leak"]
