"""Prompts with tools: those that settings name, the choice of a row, verl's tools, and what they earn."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.main import main
from agentgym.data import DataConfig
from agentgym.envs import Action, TextEnv, make_env
from agentgym.errors import ConfigError, EnvironmentFault, ToolSchemaError, UnknownName
from agentgym.evaluation.play.config import EvalConfig
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.tools import register_tool
from agentgym.tools.named_tools import named_tools
from agentgym.trainers.config import TrainConfig
from agentgym.types import Message, ToolCall

ROOT = Path(__file__).parents[3]
OWN = '''
from agentgym.tools import tool


def search(query: str) -> str:
    """Finds a fact."""
    return f"about {query}: 42"


@tool(name="double")
def twice(number: int) -> int:
    """Doubles a number."""
    return 2 * number


def plus(first, second):
    return str(first + second)


KIT = [search, twice]
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "plus",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}},
            "required": ["first", "second"],
        },
    },
}
VERL = '''
LOG = []


class Answer:
    """In the form of verl's BaseTool."""

    def __init__(self, config, tool_schema):
        self.config, self.answers = config, {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        LOG.append(("create", ground_truth))
        self.answers[instance_id] = ground_truth
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        right = parameters["answer"] == self.answers[instance_id]
        return f"score {float(right)}", self.config["bonus"] if right else -0.5, {}

    async def calc_reward(self, instance_id, **kwargs):
        return 0.25

    async def release(self, instance_id, **kwargs):
        LOG.append(("release", self.answers.pop(instance_id)))
'''
VERL_FILE = """
tools:
  - class_name: "{module}.Answer"
    config: {{bonus: 2.0, type: native}}
    tool_schema:
      type: function
      function:
        name: check_answer
        description: Checks an answer.
        parameters:
          type: object
          properties: {{answer: {{type: string}}}}
          required: [answer]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "tools.json").write_text(json.dumps([{**SCHEMA, "call": "own.py:plus"}]))
    return tmp_path


def call(env: TextEnv, name: str, **arguments: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
    return env.step(Action.from_message(Message("assistant", "", tool_calls=(ToolCall("call_0", name, arguments),))))


def say(env: TextEnv, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    return env.step(Action.from_message(Message("assistant", text)))


def row(**further: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "ground_truth": "5", **further}


def test_functions_lists_and_schema_files_give_tools_and_plain_replies_end_episodes(folder: Path) -> None:
    env = make_env("ToolPrompt-v0", {"tools": [f"{folder}/own.py:KIT", f"{folder}/tools.json"]})
    assert env.reset(seed=0, options=row())[0] == "What is 2 + 3?"
    assert [spec.name for spec in env.tool_specs] == ["search", "double", "plus"]
    assert call(env, "search", query="life")[:3] == ("about life: 42", 0.0, False)
    assert call(env, "double", number=4)[0] == "8"
    assert call(env, "plus", first=2, second=3)[0] == "5"
    assert "is not of type" in call(env, "plus", first="2", second=3)[0]
    _, reward, terminated, _, info = say(env, " 5 ")
    assert (reward, terminated) == (1.0, True)
    assert info["metrics"]["exact_match"] == 1.0 and info["metrics"]["tool_calls"] == 4
    assert "success" not in info["metrics"]  # the reward is the verdict of a row
    env.reset(seed=0, options=row())
    assert say(env, "6")[1:3] == (0.0, True)


def test_without_a_row_it_is_a_sum_with_a_verdict() -> None:
    env = make_env("ToolPrompt-v0")
    env.reset(seed=3)
    assert say(env, str(env.unwrapped.ground_truth))[4]["metrics"]["success"] == 1.0  # type: ignore[attr-defined]


def test_a_row_is_shown_the_tools_that_it_names(folder: Path) -> None:
    env = make_env("ToolPrompt-v0", {"tools": [f"{folder}/own.py:KIT", f"{folder}/tools.json"]})
    for tools in (["plus", "search"], [SCHEMA, {"name": "search"}]):
        env.reset(seed=0, options=row(tools=tools))
        assert [spec.name for spec in env.tool_specs] == ["plus", "search"]
    env.reset(seed=0, options=row())
    assert len(env.tool_specs) == 3
    for tools, message in (
        (["plsu"], "names the tool 'plsu', which is not there: did you mean 'plus'"),
        ("plus", "a list"),
    ):
        with pytest.raises(ConfigError, match=message):
            env.reset(seed=0, options=row(tools=tools))


@pytest.mark.long
def test_registered_tools_and_mcp_servers_are_named(tmp_path: Path) -> None:
    register_tool({"name": "shout", "description": "Shouts."}, lambda: "HEY")
    server = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'examples' / '_towns_server.py'))}"
    config = {"mcpServers": {"people": {"command": sys.executable, "args": [str(ROOT / "examples/_towns_server.py")]}}}
    (tmp_path / "servers.json").write_text(json.dumps(config))
    for name in (f"mcp:{server}", str(tmp_path / "servers.json")):
        env = make_env("ToolPrompt-v0", {"tools": ["shout", name]})
        env.reset(seed=0, options=row())
        assert [spec.name for spec in env.tool_specs][:1] == ["shout"] and len(env.tool_specs) > 1
        assert call(env, "shout")[0] == "HEY"
        env.close()


def test_tools_of_verl_are_created_with_the_rows_keywords_and_their_rewards_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answer_tool.py").write_text(VERL)
    (tmp_path / "verl.yaml").write_text(VERL_FILE.format(module="answer_tool"))
    monkeypatch.syspath_prepend(str(tmp_path))
    env = make_env("ToolPrompt-v0", {"tools": [str(tmp_path / "verl.yaml")]})
    extra = {"tools_kwargs": {"check_answer": {"create_kwargs": {"ground_truth": "5"}}}}
    for _ in range(2):
        env.reset(seed=0, options=row(extra_info=extra))
        assert call(env, "check_answer", answer="4")[:2] == ("score 0.0", -0.5)
        assert call(env, "check_answer", answer="5")[:2] == ("score 1.0", 2.0)
        assert say(env, "5")[1:3] == (1.25, True)
    env.close()
    log = sys.modules["answer_tool"].LOG
    assert log == [("create", "5"), ("release", "5")] * 2


USER = '''
LOG = []


class PatientInteraction:
    """In the form of verl's BaseInteraction."""

    def __init__(self, config):
        self.config = config

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        LOG.append(("start", ground_truth, kwargs["name"]))
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        LOG.append([(item["role"], item["content"]) for item in messages])
        right = messages[-1]["content"] == kwargs["ground_truth"]
        return right, "Right." if right else "Think again.", 1.0 if right else self.config["wrong"], {}

    async def finalize_interaction(self):
        LOG.append("end")


class Plain:
    def __init__(self, config):
        self.name = config["name"]

    def generate_response(self, instance_id, messages, **kwargs):
        return ("yes",) if kwargs.get("odd") else (True, self.name, None, {})
'''
USER_FILE = """
interaction:
  - class_name: "{module}.PatientInteraction"
    config: {{wrong: -0.5}}
  - class_name: "{module}.Plain"
"""


def asked(name: str, **further: Any) -> dict[str, Any]:
    return row(extra_info={"interaction_kwargs": {"name": name, "ground_truth": "5", **further}})


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "patient_user.py").write_text(USER)
    (tmp_path / "interaction.yaml").write_text(USER_FILE.format(module="patient_user"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "patient_user", raising=False)
    return str(tmp_path / "interaction.yaml")


def test_an_interaction_of_verl_answers_replies_until_it_ends_the_episode(folder: Path, user_file: str) -> None:
    env = make_env("ToolPrompt-v0", {"tools": [f"{folder}/own.py:twice", user_file]})
    assert env.reset(seed=0, options=asked("patient"))[0] == "What is 2 + 3?"
    assert say(env, "4")[:3] == ("Think again.", -0.5, False)
    assert call(env, "double", number=2)[:2] == ("4", 0.0)
    observation, reward, terminated, _, info = say(env, "5")
    assert (observation, reward, terminated) == ("Right.", 1.0, True)
    assert info["metrics"]["turns"] == 3 and "success" not in info["metrics"]
    first, (*_, last), end = (entry for entry in sys.modules["patient_user"].LOG if entry != ("start", "5", "patient"))
    assert sys.modules["patient_user"].LOG[0] == ("start", "5", "patient")
    assert first == [("user", "What is 2 + 3?"), ("assistant", "4")]
    assert (last, end) == (("assistant", "5"), "end")
    log = sys.modules["patient_user"].LOG[2]
    assert log[2:] == [("user", "Think again."), ("assistant", ""), ("tool", "4"), ("assistant", "5")]
    env.close()


def test_an_interaction_is_one_of_each_episode_and_ends_with_it(user_file: str) -> None:
    env = make_env("ToolPrompt-v0", {"tools": [user_file], "max_turns": 2})
    for _ in range(2):
        env.reset(seed=0, options=asked("patient"))
        assert say(env, "1")[2:4] == (False, False)
        assert say(env, "2")[1:4] == (-0.5, False, True)  # the limit of replies
    env.close()
    log = sys.modules["patient_user"].LOG
    assert log.count("end") == log.count(("start", "5", "patient")) == 2
    env.reset(seed=0, options=asked("plain"))
    assert say(env, "x")[:3] == ("plain", 0.0, True)
    env.reset(seed=3)  # without a row it stays a sum
    assert say(env, str(env.unwrapped.ground_truth))[1] == 1.0  # type: ignore[attr-defined]
    env.close()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            row(),
            ConfigError,
            r"the row names no interaction: extra_info\.interaction_kwargs\.name is one of patient, pl",
        ),
        (asked("patien"), UnknownName, "the interaction 'patien', which is not in patient, plain: did you mean 'pat"),
    ],
)
def test_a_row_without_an_interaction_of_the_file_is_refused(
    user_file: str, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    env = make_env("ToolPrompt-v0", {"tools": user_file})
    with pytest.raises(kind, match=message):
        env.reset(seed=0, options=options)
    env.close()


def test_an_invalid_answer_is_a_fault_of_the_interaction(user_file: str) -> None:
    env = make_env("ToolPrompt-v0", {"tools": user_file})
    env.reset(seed=0, options=asked("plain", odd=True))
    with pytest.raises(
        EnvironmentFault, match=r"Plain\.generate_response returns \(ends, text, score, values\), got \("
    ):
        say(env, "x")
    env.close()


TRL = '''
class Lock:
    def reset(self, code=0, prompt=None, **columns):
        self.code, self.opened, self.asked = code, False, len(prompt)
        return " It has a dial."

    def turn(self, digit: int) -> str:
        """Turns the dial.

        Args:
            digit: The digit to set.
        """
        self.opened = digit == self.code
        return "It opens." if self.opened else "No."

    def _hidden(self): ...


class Paying(Lock):
    async def get_reward(self) -> float:
        return 2.0 if self.opened else 0.5


class Steps(Lock):
    def step(self, action): ...
'''


def test_methods_of_an_environment_of_trl_are_tools_and_it_pays_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "lock.py").write_text(TRL)
    env = make_env("ToolPrompt-v0", {"tools": [f"{tmp_path}/lock.py:Paying"]})
    for digit, answer, reward in ((7, "It opens.", 2.0), (3, "No.", 0.5)):
        _, info = env.reset(seed=0, options=row(extra_info={"code": 7}, ground_truth="5"))
        assert info["messages"][-1].content.endswith(" It has a dial.")
        assert [spec.name for spec in env.tool_specs] == ["turn"]
        assert call(env, "turn", digit=digit)[:2] == (answer, 0.0)
        assert say(env, "5")[1:3] == (reward, True)  # and no further point for the ground truth
    env.close()
    free = make_env("ToolPrompt-v0", {"tools": [f"{tmp_path}/lock.py:Lock"]})
    free.reset(seed=0, options=row(ground_truth="5"))
    assert say(free, "5")[1:3] == (1.0, True)
    free.close()
    with pytest.raises(ConfigError, match="name it with --env"):
        make_env("ToolPrompt-v0", {"tools": [f"{tmp_path}/lock.py:Steps"]})


@pytest.mark.parametrize(
    ("name", "content", "kind", "message"),
    [
        ("own.py:serch", "", UnknownName, "has no tool 'serch': did you mean 'search'"),
        ("shuot", "", UnknownName, "unknown tool 'shuot'"),
        ("none.json", None, ConfigError, "cannot read the tools"),
        ("bad.json", "{", ConfigError, "is not JSON"),
        ("bad.json", "{}", ConfigError, "is a list of tools, or an object with tools or mcpServers"),
        ("bad.json", '[{"function": {}}]', ConfigError, "and `call`"),
        ("bad.json", '[{"call": "own.py:plus"}]', ToolSchemaError, 'a tool schema has a "name"'),
        ("bad.json", '{"mcpServers": {"one": {}}}', ConfigError, "server 'one' has a command or a url"),
        ("bad.yaml", "tools: 3", ConfigError, "holds no `tools`"),
        ("bad.yaml", "tools: [{class_name: json.loads}]", ConfigError, "is not a class with a method execute"),
        (
            "bad.yaml",
            "tools: [{class_name: json.loads, tool_schema: {function: {name: x}}}]",
            ConfigError,
            "is not a class with a method execute",
        ),
        ("bad.yaml", "interaction: {}", ConfigError, "`interaction` is a list of objects with class_name"),
        ("bad.yaml", "interaction: [3]", ConfigError, "interaction 0: an object with class_name was wanted, got 3"),
        ("bad.yaml", "interaction: [{class_name: json.loads}]", ConfigError, "not a class with a method generate_resp"),
        ("bad.yaml", "interaction: [{class_name: verl.no.Such}]", UnknownName, "verl's own classes need verl"),
        ("openapi:pets.yaml", "", ConfigError, "write openapi:DOCUMENT@URL"),
    ],
)
def test_what_names_no_tools_is_refused(
    folder: Path, name: str, content: str | None, kind: type[Exception], message: str
) -> None:
    if content:
        (folder / name).write_text(content)
    place = name if name.startswith("openapi:") or "." not in name else str(folder / name)
    with pytest.raises(kind, match=message):
        named_tools([place])


def test_settings_give_rows_their_tools(folder: Path) -> None:
    data = DataConfig(train=("rows.jsonl",), tools=("own.py:search",))
    for config in (TrainConfig(data=data), EvalConfig(data=data)):
        assert (config.env, config.env_kwargs) == ("ToolPrompt-v0", {"tools": ["own.py:search"]})
    with pytest.raises(ConfigError, match=r"data\.tools are for ToolPrompt-v0, and env is TextGame-v0"):
        TrainConfig(env="TextGame-v0", data=data)


@pytest.mark.long
def test_rows_of_an_agent_with_tools_are_trained_and_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, run = folder / "rows.jsonl", folder / "run"
    tool_rows = [{"prompt": f"{n} + 1?", "answer": str(n + 1), "agent_name": "tool_agent"} for n in range(4)]
    rows.write_text(
        "".join(json.dumps(row) + "\n" for row in [*tool_rows, {"prompt": "x", "answer": "y", "tools": ["search"]}])
    )
    small = "--steps 1 --tasks 2 --group-size 2 --eval.episodes 0 --limits.max-turns 2"
    words = ["--tools", f"{folder}/own.py:KIT", "--data.train", str(rows)]
    assert main(["train", *words, *small.split(), "--output", str(run)]) == 0
    played = [record.trajectory for record in read_episodes(run)]
    assert {trajectory.task.env_id for trajectory in played} == {"ToolPrompt-v0"}
    assert all(spec for trajectory in played for row in trajectory.rows for spec in (row.tools or ()))
    assert main(["verify", str(run)]) == 0
    words = ["eval", "--tools", f"{folder}/own.py:KIT", "--data.eval", str(rows), "-n", "5", "--policy", "oracle"]
    capsys.readouterr()
    assert main([*words, "--output", str(folder / "eval"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["success"] == 1.0
