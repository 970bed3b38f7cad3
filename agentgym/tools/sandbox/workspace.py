"""A box to work in: the operations of a container (`ShellMachine`) over a sandbox's sessions."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from agentgym.errors import SandboxError
from agentgym.tools.containers.workspace import Ran
from agentgym.tools.sandbox.protocol import Ended, Outcome, Sandbox, SandboxSession

__all__ = ["BoxWorkspace"]

ARCHIVE = ".files.tar"
SIGNALED = 128  # a shell adds the signal's number to this
KILL_CODE = 137


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

    def write(self, files: Mapping[str, bytes], *, is_protected: bool = False) -> None:
        """Writes files; missing folders are created. There is one user, from whom no file is protected."""
        _require_ok(self._run(":", files=files), "files could not be written into a box")

    def read(self, path: str, max_bytes: int = 1 << 20) -> bytes | None:
        """Returns a regular file's content; None if there is none at the path, or a larger one."""
        content = self._run(":", collect=[path]).files.get(path)
        return None if content is None or len(content) > max_bytes else content

    def end_processes(self) -> None:
        """Does nothing: the processes of a command end with it."""

    def renew(self, without: Sequence[str] = ()) -> None:
        """Moves the files into a new box: no process that saw a command of before is left."""
        paths = {str(path) for name in self._folders for path in (PurePosixPath(name), *PurePosixPath(name).parents)}
        folders = [shlex.quote(f"./{path}") for path in sorted(paths - {"."})]
        left_out = " ".join(f"! -path {folder}" for folder in folders)
        left_out += "".join(f" ! -path {shlex.quote(f'./{name}/*')}" for name in without)
        archive = f"find . -mindepth 1 {left_out} -print0 | tar cf {ARCHIVE} --no-recursion --null -T -"
        packed = self._run(f"cd ~ && rm -rf {ARCHIVE} && {archive}", collect=[ARCHIVE])
        _require_ok(packed, "the files of a box could not be taken out")
        self.close()
        if (content := packed.files.get(ARCHIVE)) is None:
            raise SandboxError("the files of a box could not be taken out: they are too large")
        self._session = self._sandbox.session()
        steps = [f"tar xof {ARCHIVE}", *(f"[ ! -L {folder} ] && [ -d {folder} ]" for folder in folders)]
        steps += [f"rm -f {ARCHIVE}", *(f"find ./{shlex.quote(name)} -mindepth 1 -delete" for name in without)]
        unpacked = self._run(" && ".join(steps), files={ARCHIVE: content})
        _require_ok(unpacked, "the files of a box could not be put into another")

    def close(self) -> None:
        """Ends the box and everything in it."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

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


def _require_ok(outcome: Outcome, what: str) -> None:
    if not outcome.ok:
        raise SandboxError(f"{what} ({outcome.ended}): {outcome.stderr.strip()[-300:] or outcome.exit_code}")
