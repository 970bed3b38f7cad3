"""A plain subprocess, for code that you would run yourself: it isolates nothing, and every outcome is marked unsafe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agentgym.errors import ConfigError
from agentgym.tools.sandbox.protocol import Ended, Outcome, SandboxSession
from agentgym.tools.sandbox.request import ExecutionRequest, Runner

__all__ = ["UNSAFE", "BareSubprocess"]

UNSAFE = "none (unsafe)"


class BareSubprocess(Runner):
    """No sandbox: programs have your user's rights, files and network. Only the time and output limits apply."""

    backend = UNSAFE

    def _execute(self, request: ExecutionRequest) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="agentgym-unsafe-", ignore_cleanup_errors=True) as name:
            return self._run_in(Path(name), request)

    def _run_in(self, folder: Path, request: ExecutionRequest) -> Outcome:
        for path, content in request.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        code = request.code.decode("utf-8", "surrogatepass")
        command = [sys.executable, "-c", code] if request.language == "python" else ["/bin/sh", "-c", code]
        started, ended, max_bytes = time.monotonic(), Ended.EXITED, self.limits.output_kb * 1024
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
            try:
                process.wait(request.time_limit_s)
            except subprocess.TimeoutExpired:
                ended = Ended.TIME_LIMIT
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            texts = []
            for stream in (out, err):
                stream.seek(0)
                part = stream.read(max_bytes + 1)
                ended = Ended.OUTPUT_LIMIT if len(part) > max_bytes and ended is Ended.EXITED else ended
                texts.append(part[:max_bytes].decode("utf-8", "replace"))
                max_bytes -= len(part[:max_bytes])
        paths = sorted(path for pattern in request.collect for path in folder.glob(pattern) if path.is_file())
        return Outcome(
            stdout=texts[0],
            stderr=texts[1],
            exit_code=process.returncode,
            ended=ended,
            backend=UNSAFE,
            seconds=time.monotonic() - started,
            files={str(path.relative_to(folder)): path.read_bytes() for path in paths},
        )

    def session(self) -> SandboxSession:
        """Raises ConfigError: there is no state to roll back to."""
        raise ConfigError("a bare subprocess has no sessions: they need a sandbox (namespaces, landlock or docker)")
