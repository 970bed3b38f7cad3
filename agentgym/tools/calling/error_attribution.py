"""Decides whether a tool's exception is the model's mistake, which it reads, or a fault of the environment."""

from __future__ import annotations

import errno
import inspect
import re
import subprocess
import traceback
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from agentgym.errors import ConfigError, InvalidTrajectory, RenderError, ToolFailure, ToolSchemaError, UnknownName
from agentgym.types import JSON

__all__ = ["is_models_mistake", "is_outside", "raised_at"]

OF_THE_INPUT = (
    ValueError,
    LookupError,
    ArithmeticError,
    SyntaxError,
    RecursionError,
    re.error,
    subprocess.SubprocessError,
)
"""The errors that Python raises over given values, keys, numbers and texts, and over programs that it ran."""
OF_THE_SETTINGS = (ConfigError, InvalidTrajectory, RenderError, ToolSchemaError, UnknownName)
"""Errors of agentgym that derive from the builtins above, and that no argument causes."""
PARSERS = frozenset({"_csv", "jsonschema", "lxml", "xml", "yaml", "zlib"})
"""Packages whose errors are about the text that they read."""
CLIENTS = frozenset(
    "aiobotocore aiohttp anthropic azure boto3 botocore docker elasticsearch grpc google.api_core google.auth "
    "google.cloud google.genai http.client httpcore httpx kubernetes openai opensearchpy paramiko pymongo redis "
    "requests urllib.error urllib.request urllib3 websocket websockets".split()
)
"""Packages that talk to a service: every error that they raise, or that is raised inside of them, is a fault."""
DATABASES = frozenset(
    "MySQLdb asyncpg duckdb mysql oracledb psycopg psycopg2 pymysql pyodbc sqlalchemy sqlite3".split()
)
OF_THE_STATEMENT = frozenset({"DataError", "IntegrityError", "NotSupportedError", "ProgrammingError"})
"""PEP 249's names of errors about the SQL; OperationalError, InterfaceError and InternalError are the database's."""
SQLSTATES = frozenset({"21", "22", "23", "42"})
"""Classes of SQLSTATE about the SQL: cardinality, data, constraint, syntax."""
SQLITE_CODES = frozenset({1, 8, 18, 19, 20, 23, 25})
"""SQLite's result codes about the SQL: ERROR, READONLY, TOOBIG, CONSTRAINT, MISMATCH, AUTH and RANGE. Python raises
OperationalError both for a misspelt statement (ERROR) and for a full disk (FULL)."""
CALLERS = ("agentgym.tools.", "verifiers.")
"""Modules that call tools: a TypeError in one of them means that the tool does not take the arguments."""
OF_THE_PATH = frozenset(
    {
        *(errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR),
        *(errno.ENOTEMPTY, errno.EPERM),
    }
)
"""The system errors that a path can cause."""
OF_THE_CONNECTION = ("created in a thread", "on a closed")
"""The words of those ProgrammingErrors of sqlite3 that no statement causes; they have no code."""


def is_models_mistake(error: BaseException, arguments: Mapping[str, JSON]) -> bool:
    """Returns whether the model can have caused `error` by calling a tool with `arguments`.

    True for errors that Python raises over its input, for arguments that the tool does not take, for an SQL statement
    that the database refuses, and for a path of the arguments that the system refuses. False for all others: errors of
    the machine, of services and of databases, and errors that no input explains (AttributeError, other TypeErrors,
    AssertionError, RuntimeError, SystemExit, ...).
    """
    if isinstance(error, ToolFailure):
        return True
    packages = {package for cls in type(error).__mro__ for package in _packages(cls.__module__)}
    if packages & DATABASES:
        return _is_about_the_statement(error)
    if packages & CLIENTS or isinstance(error, OF_THE_SETTINGS):
        return False
    if isinstance(error, OSError):
        return error.errno in OF_THE_PATH and _names_an_argument(error, arguments)
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, TypeError):
        return bool(modules) and modules[-1].startswith(CALLERS)
    if not (isinstance(error, OF_THE_INPUT) or packages & PARSERS):
        return False
    return not any(CLIENTS & _packages(module) for module in modules)


def is_outside(error: BaseException) -> bool:
    """Returns whether the machine, a service or a database failed, so that other input would have failed too."""
    packages = {package for cls in type(error).__mro__ for package in _packages(cls.__module__)}
    if packages & DATABASES:
        return not _is_about_the_statement(error)
    return bool(packages & CLIENTS) or isinstance(error, OSError | MemoryError)


def raised_at(error: BaseException, function: object) -> str:
    """Returns " (FILE, line N)" of the last frame in the file of `function`, else of the last frame; "" without one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = inspect.unwrap(function) if callable(function) else function
    file = getattr(getattr(own, "__code__", None), "co_filename", None)
    frame = next((entry for entry in reversed(frames) if entry.filename == file), frames[-1] if frames else None)
    return f" ({frame.filename}, line {frame.lineno})" if frame else ""


def _packages(module: str) -> set[str]:
    """Returns the names of a module's package and of the module in it: {"http", "http.client"}."""
    parts = module.split(".")
    return {parts[0], ".".join(parts[:2])}


def _is_about_the_statement(error: BaseException) -> bool:
    error = getattr(error, "orig", None) or error  # SQLAlchemy wraps what the driver raised
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(code, int):
        return code & 0xFF in SQLITE_CODES
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str):
        return state[:2] in SQLSTATES
    is_about_the_connection = any(words in str(error) for words in OF_THE_CONNECTION)
    return not is_about_the_connection and any(cls.__name__ in OF_THE_STATEMENT for cls in type(error).__mro__)


def _names_an_argument(error: OSError, arguments: Mapping[str, JSON]) -> bool:
    """Returns whether a name in the refused path, with or without its suffix, is the last name in an argument."""
    refused = {name for path in (error.filename, error.filename2) for part in _parts(path) for name in _names(part)}
    last = (parts[-1] for value in _leaves(arguments) if (parts := _parts(value)))
    return any(name in refused for part in last for name in _names(part))


def _parts(path: object) -> tuple[str, ...]:
    if isinstance(path, bytes):
        path = path.decode("utf-8", "replace")
    return PurePath(path).parts if isinstance(path, str) else ()


def _names(part: str) -> tuple[str, str]:
    return part, PurePath(part).stem


def _leaves(value: JSON) -> Iterator[str]:
    """Yields the texts and numbers in a JSON value, as text."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, str | int | float):
        yield str(value)
    elif value is not None:
        for part in value:
            yield from _leaves(part)
