"""A code execution service: the boxes of this machine behind SandboxFusion's API, `POST /run_code`."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from agentgym.errors import ConfigError, SandboxError
from agentgym.http_guard import HttpGuard, JsonServer, RequestRejected, parse_json_object
from agentgym.tools.sandbox.protocol import Ended, Language, Outcome, Sandbox, SandboxLimits
from agentgym.tools.sandbox.service import LANGUAGES

__all__ = ["SandboxServer"]

MAX_BODY = 64 << 20
STDIN, PROGRAM = ".stdin", ".main.py"
READ_STDIN: dict[Language, str] = {
    "python": """
import os
os.dup2(os.open(".stdin", os.O_RDONLY), 0)
with open(".main.py", encoding="utf-8", errors="surrogatepass") as file:
    program = file.read()
os.unlink(".stdin")
os.unlink(".main.py")
exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
""",
    "shell": "exec < .stdin; rm .stdin\n",
}
"""Prologues that give a program its standard input, of which a box has none; the Python program is in a file beside."""


class SandboxServer(JsonServer):
    """Runs the programs that are posted to it, each in a box of its own; an asynchronous context manager.

    | request | answer |
    |---|---|
    | `POST /run_code`, `{"code": ..., "language": "python"}` | `{"status": ..., "run_result": {...}, "files": {...}}` |
    | `GET /health` | how many programs were run |

    A request may have `run_timeout` (10 s), `memory_limit_MB`, `stdin`, `files` (path to base64), `fetch_files` (paths
    to return). Languages are `python` and `bash`. `status` is `Success` for exit code 0, `Failed` for any other end,
    and `SandboxError` if the box itself failed. A limit above the server's own is refused; memory is the server's.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        limits: SandboxLimits,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        concurrency: int,
        guard: HttpGuard | None = None,
    ) -> None:
        """`limits` are those that the sandbox was opened with."""
        self._sandbox, self._limits = sandbox, limits
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="sandbox")
        self.num_run = 0
        endpoints = {("POST", "/run_code"): self._run, ("GET", "/health"): self._health}
        super().__init__(endpoints, guard or HttpGuard(host), host, port, max_body=MAX_BODY)

    async def _health(self, _: bytes) -> tuple[int, object]:
        return 200, {"status": "ok", "run": self.num_run}

    async def _run(self, raw: bytes) -> tuple[int, object]:
        call = _call_of(parse_json_object(raw), self._limits)
        loop = asyncio.get_running_loop()
        try:
            outcome = await loop.run_in_executor(self._threads, lambda: self._sandbox.run(**call))
        except ConfigError as error:
            raise RequestRejected(422, "invalid_request", str(error)) from error
        except SandboxError as error:
            return 200, {"status": "SandboxError", "message": str(error), "compile_result": None, "run_result": None}
        self.num_run += 1
        return 200, _answer(outcome)


def _call_of(body: Mapping[str, Any], limits: SandboxLimits) -> dict[str, Any]:
    """Returns the arguments of `Sandbox.run`; raises RequestRejected for a request that cannot be served."""
    code, stdin = body.get("code"), body.get("stdin")
    files, fetched = body.get("files") or {}, body.get("fetch_files") or []
    language = next((ours for ours, name in LANGUAGES.items() if name == body.get("language")), None)
    if language is None:
        _refuse(f"the language is {' or '.join(LANGUAGES.values())}, got {body.get('language')!r:.80}")
    if not isinstance(code, str) or not isinstance(stdin, str | None) or not isinstance(files, dict):
        _refuse("code is a text, stdin a text or null, and files maps paths to base64")
    if not isinstance(fetched, list) or not all(isinstance(path, str) for path in fetched):
        _refuse("fetch_files is a list of paths")
    seconds, memory_mb = (body.get(name) for name in ("run_timeout", "memory_limit_MB"))
    seconds = min(10.0, limits.time_limit_s) if seconds is None else seconds
    memory_mb = -1 if memory_mb is None else memory_mb
    for name, value, max_value in (
        ("run_timeout", seconds, limits.time_limit_s),
        ("memory_limit_MB", memory_mb, limits.memory_mb),
    ):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value <= max_value:
            _refuse(f"{name} is a number of at most {max_value:g}, the limit of this server; got {value!r:.80}")
    try:
        contents = {str(path): base64.b64decode(content or "", validate=True) for path, content in files.items()}
    except (TypeError, ValueError, binascii.Error) as error:
        _refuse(f"the content of a file is not base64: {error}")
    if stdin and (conflicts := sorted({STDIN, PROGRAM} & {os.path.normpath(path) for path in contents})):
        _refuse(f"a file named {conflicts[0]} cannot be given beside stdin")
    if stdin:
        contents[STDIN] = stdin.encode("utf-8", "surrogatepass")
        if language == "python":
            contents[PROGRAM], code = code.encode("utf-8", "surrogatepass"), ""
        code = READ_STDIN[language] + code
    return {"code": code, "language": language, "files": contents, "collect": fetched, "time_limit_s": seconds}


def _refuse(message: str) -> NoReturn:
    raise RequestRejected(422, "invalid_request", message)


def _answer(outcome: Outcome) -> dict[str, Any]:
    stopped = "" if outcome.ended in (Ended.EXITED, Ended.TIME_LIMIT) else f"\n[stopped: {outcome.ended.value}]\n"
    return {
        "status": "Success" if outcome.ok else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": "TimeLimitExceeded" if outcome.ended is Ended.TIME_LIMIT else "Finished",
            "execution_time": outcome.seconds,
            "return_code": None if outcome.ended is Ended.TIME_LIMIT else outcome.exit_code,
            "stdout": outcome.stdout,
            "stderr": outcome.stderr + stopped,
        },
        "executor_pod_name": None,
        "files": {path: base64.b64encode(content).decode() for path, content in outcome.files.items()},
    }
