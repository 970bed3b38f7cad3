"""Which exceptions of a tool are the model's mistakes, and which are faults of the environment."""

from __future__ import annotations

import csv
import http.client
import json
import sqlite3
import subprocess
import sys
import urllib.error
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from agentgym.envs.adapters.reasoning_gym import scored_by
from agentgym.errors import ConfigError, EngineError, ToolFailure, UnknownName
from agentgym.tools.calling.error_attribution import is_models_mistake, raised_at
from agentgym.types import JSON


def raised(function: Callable[..., object], *args: Any) -> BaseException:
    try:
        function(*args)
    except BaseException as error:  # noqa: BLE001  # what is raised is the point
        return error
    raise AssertionError("it raised nothing")


def foreign(module: str, name: str, *bases: type, **attributes: Any) -> BaseException:
    """An exception as a library that is not installed here would raise it."""
    error: BaseException = type(name, bases or (Exception,), {"__module__": module})("it is down")
    for attribute, value in attributes.items():
        setattr(error, attribute, value)
    return error


@pytest.mark.parametrize(
    ("error", "mistake"),
    [
        (ToolFailure("no such door"), True),
        (json.JSONDecodeError("odd", "{", 1), True),
        (subprocess.TimeoutExpired("python program.py", 5), True),
        (subprocess.CalledProcessError(1, "python program.py"), True),
        (csv.Error("odd"), True),
        (foreign("yaml.scanner", "ScannerError"), True),
        (ConfigError("a setting"), False),
        (UnknownName("a name"), False),
        (EngineError("a judge is down"), False),
        (NotImplementedError(), False),
        (urllib.error.URLError("down"), False),
        (urllib.error.HTTPError("http://x", 500, "down", Message(), None), False),
        (http.client.RemoteDisconnected("down"), False),
        (http.client.IncompleteRead(b""), False),
        (foreign("httpx", "ConnectTimeout"), False),
        (foreign("aiohttp.client_exceptions", "InvalidURL", ValueError), False),
        (foreign("requests.exceptions", "JSONDecodeError", ValueError), False),
        (foreign("botocore.exceptions", "ClientError"), False),
        (foreign("google.api_core.exceptions", "ServiceUnavailable"), False),
        (foreign("redis.exceptions", "DataError"), False),
        (foreign("psycopg", "OperationalError"), False),
        (foreign("psycopg.errors", "UndefinedTable", sqlstate="42P01"), True),
        (foreign("asyncpg.exceptions", "TooManyConnectionsError", sqlstate="53300"), False),
        (foreign("sqlalchemy.exc", "ProgrammingError"), True),
        (foreign("sqlalchemy.exc", "OperationalError", orig=foreign("sqlite3", "OperationalError")), False),
    ],
    ids=lambda value: f"{type(value).__module__}.{type(value).__name__}" if isinstance(value, Exception) else None,
)
def test_errors_of_services_and_databases_are_faults(error: BaseException, mistake: bool) -> None:
    assert is_models_mistake(error, {}) is mistake


def test_a_statement_that_sqlite_refuses_is_the_models_and_a_locked_file_is_not(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    writer, second_writer = sqlite3.connect(file), sqlite3.connect(file, timeout=0)
    writer.execute("CREATE TABLE stock (name TEXT UNIQUE)")
    writer.execute("INSERT INTO stock VALUES ('lamp')")
    for statement in ("SELCT 1", "SELECT * FROM nowhere", "INSERT INTO stock VALUES ('lamp')"):
        assert is_models_mistake(raised(writer.execute, statement), {}), statement
    locked = raised(second_writer.execute, "INSERT INTO stock VALUES ('door')")
    assert str(locked) == "database is locked"
    assert not is_models_mistake(locked, {})
    missing = raised(sqlite3.connect, tmp_path / "nowhere" / "shop.db")
    assert not is_models_mistake(missing, {})


def test_a_connection_of_another_thread_or_a_closed_one_is_the_environments() -> None:
    connection = sqlite3.connect(":memory:")
    assert is_models_mistake(raised(connection.execute, "SELECT ?"), {}), "a value is missing"
    with ThreadPoolExecutor(1) as other_thread:
        misplaced = other_thread.submit(raised, connection.execute, "SELECT 1").result()
    assert isinstance(misplaced, sqlite3.ProgrammingError) and not is_models_mistake(misplaced, {})
    connection.close()
    assert not is_models_mistake(raised(connection.execute, "SELECT 1"), {})


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        ({"path": "plans.txt"}, True),
        ({"path": "./notes/plans.txt"}, True),
        ({"name": "plans"}, True),
        ({"files": [{"path": "plans.txt"}]}, True),
        ({"path": "lans.txt"}, False),
        ({"path": ""}, False),
        ({"text": "a"}, False),
        ({}, False),
    ],
)
def test_a_path_that_the_model_gave_is_its_mistake_and_another_is_not(
    arguments: Mapping[str, JSON], mistake: bool, tmp_path: Path
) -> None:
    missing = raised((tmp_path / "notes" / "plans.txt").read_text)
    assert isinstance(missing, FileNotFoundError)
    assert is_models_mistake(missing, arguments) is mistake
    folder = raised(tmp_path.read_text)
    assert isinstance(folder, IsADirectoryError)
    assert is_models_mistake(folder, {"path": tmp_path.name})


def test_a_full_disk_is_a_fault_whatever_file_it_is(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device", str(tmp_path / "plans.txt"))
    assert not is_models_mistake(full, {"path": "plans.txt"})


def test_an_error_over_values_that_comes_from_inside_a_client_is_a_fault() -> None:
    """The body of a gateway's error page is no JSON, and httpx lets `json` say so."""
    scope: dict[str, Any] = {"__name__": "httpx._models", "json": json}
    exec("def read(text):\n    return json.loads(text)\n", scope)
    assert not is_models_mistake(raised(scope["read"], "<html>"), {})
    assert is_models_mistake(raised(json.loads, "<html>"), {})


def test_the_place_is_the_tools_own_line_though_a_library_raised() -> None:
    def read(text: str) -> object:
        return json.loads(text)

    line = read.__code__.co_firstlineno + 1
    assert raised_at(raised(read, "{"), read) == f" ({__file__}, line {line})"
    assert raised_at(raised(json.loads, "{"), len).startswith(f" ({Path(json.__file__).with_name('decoder.py')}, line ")
    assert raised_at(ValueError(), read) == ""


def test_no_client_is_imported_to_know_its_errors() -> None:
    clients = "[m for m in ('aiohttp', 'requests', 'httpx') if m in sys.modules]"
    code = f"import sys, agentgym.tools.calling.error_attribution; print({clients})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_a_scorer_returns_none_for_an_unreadable_answer_and_raises_if_it_is_down() -> None:
    assert scored_by(lambda: 1) == (1.0, "")
    assert scored_by(lambda: int("many")) == (None, "ValueError: invalid literal for int() with base 10: 'many'")

    def ask() -> float:
        raise ConnectionError("the judge is down")

    with pytest.raises(ConnectionError, match="the judge is down"):
        scored_by(ask)
