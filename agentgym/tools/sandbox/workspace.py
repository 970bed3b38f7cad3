"""A box to work in: the operations of a container (`ShellMachine`) over a sandbox's sessions."""

from __future__ import annotations

import contextlib
import io
import shlex
import tarfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from agentgym.errors import SandboxError
from agentgym.tools.containers.workspace import Ran
from agentgym.tools.sandbox.protocol import Ended, Outcome, Sandbox, SandboxSession

__all__ = ["BoxWorkspace", "WorkspaceError"]

ARCHIVE = ".files.tar"
ARCHIVER = shlex.join(["python3", "-I", "-S", "-c", Path(__file__).with_name("archive.py").read_text("utf-8"), ARCHIVE])
"""The program that packs and unpacks; no file in a box has a part in it."""
SIGNALED = 128  # a shell adds the signal's number to this
KILL_CODE = 137


class WorkspaceError(SandboxError):
    """The files of a box could not be moved or written, as its commands have left them."""


class BoxWorkspace:
    """A session of a sandbox that has further `folders`; files are named relative to its working folder.

    Processes end with their command. `prelude` is run before each command, in the same shell.
    """

    def __init__(self, sandbox: Sandbox, folders: Sequence[str], prelude: str = "") -> None:
        self._sandbox, self._folders, self.prelude = sandbox, tuple(folders), prelude
        self._session: SandboxSession | None = sandbox.session()

    @property
    def is_open(self) -> bool:
        """True until the box is closed or lost."""
        return self._session is not None

    def run(self, command: str, *, time_limit_s: float | None = None) -> Ran:
        """Runs a shell command, and ends what it leaves running."""
        outcome = self._run(f"{self.prelude}{command}", time_limit_s=time_limit_s)
        is_cut, timed_out = outcome.ended is Ended.OUTPUT_LIMIT, outcome.ended is Ended.TIME_LIMIT
        output, code = outcome.stdout + outcome.stderr, outcome.exit_code
        if outcome.ended is not Ended.EXITED and not is_cut and not timed_out:
            output = f"{output}\n[stopped: {outcome.ended}]"
        if code < 0:
            code = SIGNALED - code if outcome.ended is Ended.EXITED else KILL_CODE
        return Ran(
            output=output,
            exit_code=code,
            seconds=outcome.seconds,
            timed_out=timed_out,
            is_cut=is_cut,
            is_lost=outcome.is_lost,
        )

    def write(
        self, files: Mapping[str, bytes], *, is_protected: bool = False, executables: Collection[str] = ()
    ) -> None:
        """Writes files; missing folders are created. There is one user, from whom no file is protected."""
        if executables:  # Landlock lets no mode be changed: they are created with theirs
            self._unpack(_archive_of(files, executables))
        else:
            _require_ok(self._run(":", files=files), "files could not be written into a box")

    def read(self, path: str, max_bytes: int = 1 << 20) -> bytes | None:
        """Returns a regular file's content; None if there is none at the path, or a larger one."""
        content = self._run(":", collect=[path]).files.get(path)
        return None if content is None or len(content) > max_bytes else content

    def end_processes(self) -> None:
        """Does nothing: the processes of a command end with it."""

    def renew(self, without: Sequence[str] = ()) -> None:
        """Moves the files into a new box: no process that saw a command of before is left."""
        own = {str(path) for name in self._folders for path in (PurePosixPath(name), *PurePosixPath(name).parents)}
        lists = shlex.join(["\n".join(own), "\n".join(without)])
        packed = self._run(f"rm -rf {ARCHIVE} && {ARCHIVER} {lists}", collect=[ARCHIVE])
        _require_ok(packed, "the files of a box could not be taken out")
        self.close()
        if (content := packed.files.get(ARCHIVE)) is None:
            raise WorkspaceError("the files of a box could not be taken out: they are too large")
        self._session = self._sandbox.session()
        self._unpack(content)

    def close(self) -> None:
        """Ends the box and everything in it."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _unpack(self, archive: bytes) -> None:
        _require_ok(self._run(ARCHIVER, files={ARCHIVE: archive}), "files could not be written into a box")

    def _run(
        self,
        command: str,
        *,
        files: Mapping[str, bytes] | None = None,
        collect: Sequence[str] = (),
        time_limit_s: float | None = None,
    ) -> Outcome:
        if self._session is None:
            raise SandboxError("this box was closed: begin another one")
        outcome = self._session.run(command, language="shell", files=files, collect=collect, time_limit_s=time_limit_s)
        if outcome.is_lost:
            with contextlib.suppress(SandboxError):
                self.close()
        return outcome


def _archive_of(files: Mapping[str, bytes], executables: Collection[str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode, entry.mtime = len(content), 0o755 if path in executables else 0o644, time.time()
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _require_ok(outcome: Outcome, what: str) -> None:
    if not outcome.ok:
        raise WorkspaceError(f"{what} ({outcome.ended}): {outcome.stderr.strip()[-300:] or outcome.exit_code}")
