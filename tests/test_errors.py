"""Errors fit their builtin, say what they say, and survive a pickle."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

import agentgym
from agentgym import errors
from agentgym.errors import AgentGymError, EnvironmentFault, ToolFailure, UnknownName, nearest
from tests.syntax_trees import parse_file, walk_nodes

BUILTINS = {
    "ConfigError": ValueError,
    "EngineError": RuntimeError,
    "EnvironmentFault": RuntimeError,
    "InvalidTrajectory": ValueError,
    "MissingSetting": ValueError,
    "RenderError": ValueError,
    "RunFolderError": OSError,
    "SandboxError": RuntimeError,
    "ToolFailure": RuntimeError,
    "ToolSchemaError": ValueError,
    "TrainingHalted": RuntimeError,
    "UnknownName": KeyError,
    "UserCodeFault": RuntimeError,
}


def test_every_public_error_is_listed_here() -> None:
    public = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert public == {*BUILTINS, "AgentGymError"}


@pytest.mark.parametrize(("name", "builtin"), BUILTINS.items())
def test_an_error_is_ours_and_the_fitting_builtin(name: str, builtin: type[Exception]) -> None:
    error = getattr(errors, name)
    assert issubclass(error, AgentGymError)
    assert issubclass(error, builtin)


@pytest.mark.parametrize("name", BUILTINS)
def test_an_error_pickles_with_its_message(name: str) -> None:
    error = getattr(errors, name)("what was given, what was wanted, what to do")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error) == "what was given, what was wanted, what to do"


def test_an_environment_fault_carries_what_replays_it() -> None:
    fault = EnvironmentFault("step raised ZeroDivisionError", env_id="TextGame-v0", seed=7)
    copy = pickle.loads(pickle.dumps(fault))
    assert (str(copy), copy.env_id, copy.seed) == ("step raised ZeroDivisionError", "TextGame-v0", 7)


def test_a_tool_failure_carries_its_kind() -> None:
    copy = pickle.loads(pickle.dumps(ToolFailure("no answer", kind="timeout")))
    assert (str(copy), copy.kind) == ("no answer", "timeout")


def test_an_unknown_name_is_not_quoted_like_a_key() -> None:
    assert str(UnknownName("unknown env 'x'")) == "unknown env 'x'"
    assert str(UnknownName()) == ""


def test_nearest_names_the_best_match_and_is_silent_without_one() -> None:
    assert nearest("TextGme-v0", ["TextGame-v0", "Shop-v0"]) == ": did you mean 'TextGame-v0'?"
    assert nearest("zzzz", ["TextGame-v0"]) == ""
    assert nearest("NoSuch-v0", ["SearchQA-v0"]) == nearest("x", []) == ""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TimeoutError(), "TimeoutError"),
        (AssertionError("  \n"), "AssertionError"),
        (ValueError("no digit\nin x"), "ValueError: no digit"),
        (errors.ConfigError("no name"), "no name"),
        (errors.EngineError(), "EngineError"),
    ],
)
def test_a_reason_is_never_empty(error: Exception, line: str) -> None:
    assert errors.describe_error(error) == line


DEEP_SAFE = ("RecursionError", "NOT_JSON", "NO_EPISODE")


def reads_json(node: ast.Try) -> bool:
    calls = [ast.unparse(call.func) for part in node.body for call in walk_nodes(part) if isinstance(call, ast.Call)]
    return bool({"json.loads", "json.load"} & set(calls))


def test_whoever_handles_text_that_is_no_json_handles_json_that_is_nested_too_deeply() -> None:
    handled, missing = 0, []
    for path in sorted(Path(agentgym.__file__).parent.rglob("*.py")):
        for node in walk_nodes(parse_file(path)) if "json.load" in path.read_text(encoding="utf-8") else ():
            if not isinstance(node, ast.Try) or not reads_json(node):
                continue
            caught = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
            handled += "ValueError" in caught or "NOT_JSON" in caught
            if "ValueError" in caught and not any(name in caught for name in DEEP_SAFE):
                missing.append(f"{path}:{node.lineno}")
    assert handled > 20 and not missing
