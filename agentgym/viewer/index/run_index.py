"""`RunIndex`: the episodes of a run in a database of the user's cache, which follows the run's file as it grows."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentgym.errors import RunFolderError
from agentgym.rollout.record.line_reader import LineBlock, LineReader, find_episodes
from agentgym.rollout.record.stored_fields import NO_EPISODE
from agentgym.viewer.index.episode_row import episode_row

__all__ = ["IndexState", "RunIndex", "cache_folder"]

VERSION = 2
"""The form of the database and of what is read from an episode: an index of another one is built again."""
TAIL_BYTES = 256
"""The bytes before the end of what is indexed that show whether the file was cut back or replaced."""
BATCH_S = 0.5
SCHEMA = """
CREATE TABLE state (
    version INTEGER, path TEXT, position INTEGER, offset INTEGER, lines INTEGER, tail BLOB, faults INTEGER, fault TEXT
);
CREATE TABLE episodes (
    line INTEGER PRIMARY KEY, offset INTEGER, phase TEXT, step INTEGER, grp TEXT, member INTEGER, env TEXT, seed,
    task TEXT, task_env TEXT, task_digest TEXT, status TEXT, stop TEXT, reward REAL, success INTEGER, turns INTEGER,
    tokens INTEGER, sampled INTEGER, malformed INTEGER, tool_error TEXT, cause TEXT, metrics TEXT
);
CREATE TABLE calls (line INTEGER, tool TEXT, error TEXT, number INTEGER, PRIMARY KEY (line, tool, error)) WITHOUT ROWID;
CREATE VIRTUAL TABLE texts USING fts5(observations, replies, calls, content='', columnsize=0);
CREATE INDEX episodes_by_step ON episodes (phase, step);
CREATE INDEX episodes_by_task ON episodes (task);
CREATE INDEX episodes_by_group ON episodes (grp);
"""
COLUMNS = tuple(
    "line offset phase step grp member env seed task task_env task_digest status stop reward success turns tokens "
    "sampled malformed tool_error cause metrics".split()
)
_INSERT = f"INSERT INTO episodes VALUES ({', '.join(f':{name}' for name in COLUMNS)})"


@dataclass(frozen=True, slots=True)
class IndexState:
    """The progress of an index: bytes and lines that are read, those that are no episodes, and the first fault."""

    position: int = 0
    offset: int = 0
    lines: int = 0
    tail: bytes = b""
    faults: int = 0
    fault: str = ""
    size: int = 0
    """The bytes of the file; more than `position` while episodes are left to be read, or are being written."""


class RunIndex:
    """The index of a run's episodes, which `update` brings up to date; nothing is written into the run's folder.

    It is in the cache folder, or in a temporary file where that cannot be written. Queries and updates may come from
    several threads and processes. An index that is damaged, of another form, or of a file that was cut back or replaced
    is built again.
    """

    def __init__(self, run: Path, folder: Path | None = None) -> None:
        self.run = run
        self._folder = folder
        self._lock = threading.Lock()
        self._local = threading.local()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._path = self._choose_path()

    def _choose_path(self) -> Path:
        identity = os.stat(self.run)
        name = hashlib.sha256(f"{self.run.resolve()} {identity.st_dev} {identity.st_ino}".encode()).hexdigest()[:32]
        folder = self._folder or cache_folder()
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder / f"{name}.sqlite"
        self._temporary = tempfile.TemporaryDirectory(prefix="agentgym-index-")
        return Path(self._temporary.name) / f"{name}.sqlite"

    def close(self) -> None:
        """Closes this thread's connection, and removes an index that is temporary."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            del self._local.connection
        if self._temporary is not None:
            self._temporary.cleanup()

    def query(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Returns the rows of a query of the tables in `SCHEMA`."""
        try:
            return self._connection().execute(sql, values).fetchall()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and "locked" not in str(error):
                raise
            raise RunFolderError(f"the index of {str(self.run)!r} cannot be read now ({error}): try again") from error

    def state(self) -> IndexState:
        """Returns how far the file is indexed."""
        row = self.query("SELECT position, offset, lines, tail, faults, fault FROM state")
        path = find_episodes(self.run)
        size = path.stat().st_size if path else 0
        return replace(IndexState(*row[0]), size=size) if row else IndexState(size=size)

    def update(self, seconds: float | None = None) -> bool:
        """Reads what the run has written since; returns True if all of it is indexed.

        With `seconds`, it returns about that time later, whatever is left.
        """
        end = float("inf") if seconds is None else time.monotonic() + seconds
        is_new = False
        with self._lock:
            while True:
                try:
                    return self._read_on(end)
                except sqlite3.DatabaseError as error:
                    is_shared = isinstance(error, sqlite3.IntegrityError) or "locked" in str(error)
                    if is_new and not is_shared:
                        raise RunFolderError(f"the index of {str(self.run)!r} cannot be written: {error}") from error
                    if not is_shared:  # another process that indexes the same run was not just faster: it is damaged
                        self._discard()
                        is_new = True
                if time.monotonic() > end:
                    return False

    def _read_on(self, end: float) -> bool:
        path = find_episodes(self.run)
        if path is None:
            return True
        connection = self._connection()
        with _transaction(connection):
            state = self._state_of(connection, path)
        with LineReader(path) as lines:
            blocks = lines.blocks_after(state.position, state.offset)
            while True:
                with _transaction(connection):
                    state, is_whole = self._read_batch(connection, path, state, blocks, end)
                if is_whole or time.monotonic() > end:
                    return is_whole

    def _state_of(self, connection: sqlite3.Connection, path: Path) -> IndexState:
        """Returns the state of an index that is of this file as it is; any other is emptied."""
        row = connection.execute("SELECT position, offset, lines, tail, faults, fault, path FROM state").fetchone()
        if row is not None and row[-1] == path.name and row[3] == _tail_of(path, row[0]):
            return IndexState(*row[:-1])
        for table in ("state", "episodes", "calls"):
            connection.execute(f"DELETE FROM {table}")
        connection.execute("INSERT INTO texts (texts) VALUES ('delete-all')")
        return IndexState()

    def _read_batch(
        self,
        connection: sqlite3.Connection,
        path: Path,
        state: IndexState,
        blocks: Iterator[LineBlock],
        end: float,
    ) -> tuple[IndexState, bool]:
        """Indexes lines for about half a second; returns the new state, and True at the end of the file."""
        batch_end = min(time.monotonic() + BATCH_S, end)
        is_whole = False
        while time.monotonic() < batch_end:
            try:
                block = next(blocks, None)
            except RunFolderError as error:  # the rest of the file cannot be read
                state = replace(state, faults=state.faults + 1, fault=state.fault or str(error))
                block = None
            if block is None:
                is_whole = True
                break
            state = _insert(connection, path, state, block)
        connection.execute("DELETE FROM state")
        stored = (state.position, state.offset, state.lines, state.tail, state.faults, state.fault)
        connection.execute("INSERT INTO state VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (VERSION, path.name, *stored))
        return state, is_whole

    def _connection(self) -> sqlite3.Connection:
        """Returns this thread's connection to a database of this form."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is not None and self._local.path == self._path:
            return connection
        try:
            connection = self._open()
        except sqlite3.DatabaseError as error:
            if "locked" in str(error):  # another process writes it, and is not to lose it
                raise
            self._discard()
            connection = self._open()
        self._local.connection, self._local.path = connection, self._path
        return connection

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=10, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")  # what a power cut damages is built again
        connection.execute("PRAGMA cache_size = -16000")
        if connection.execute("PRAGMA user_version").fetchone()[0] == VERSION:
            return connection
        with _transaction(connection):
            if connection.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                for (name,) in connection.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'texts\\_%' ESCAPE '\\'"
                ).fetchall():
                    connection.execute(f'DROP TABLE "{name}"')
                for statement in SCHEMA.split(";\n"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {VERSION}")
        return connection

    def _discard(self) -> None:
        """Removes a database that is damaged; other connections see an old file until they are opened again."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            del self._local.connection
        for ending in ("", "-wal", "-shm"):
            Path(f"{self._path}{ending}").unlink(missing_ok=True)


def cache_folder() -> Path:
    """Returns the folder of the user's cache that holds indexes."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "agentgym" / "runs"


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with suppress(sqlite3.DatabaseError):
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _insert(connection: sqlite3.Connection, path: Path, state: IndexState, block: LineBlock) -> IndexState:
    offset, number, faults, fault = block.offset, state.lines, state.faults, state.fault
    episodes, calls, texts = [], [], []
    for line in block.lines:
        number += 1
        try:
            row = episode_row(line, offset)
        except NO_EPISODE as error:
            faults += 1
            fault = fault or f"line {number} is not an episode ({type(error).__name__}: {error})"[:300]
        else:
            episodes.append({"line": number, **row.columns})
            calls += [(number, tool, error, count) for (tool, error), count in row.calls.items()]
            texts.append((number, *row.texts))
        offset += len(line)
    connection.executemany(_INSERT, episodes)
    connection.executemany("INSERT INTO calls VALUES (?, ?, ?, ?)", calls)
    connection.executemany("INSERT INTO texts (rowid, observations, replies, calls) VALUES (?, ?, ?, ?)", texts)
    return IndexState(block.end, block.end_offset, number, _tail_of(path, block.end), faults, fault)


def _tail_of(path: Path, position: int) -> bytes:
    """Returns the bytes before a position, which differ once the file was cut back or replaced."""
    with open(path, "rb") as file:
        start = max(0, position - TAIL_BYTES)
        return os.pread(file.fileno(), position - start, start)
