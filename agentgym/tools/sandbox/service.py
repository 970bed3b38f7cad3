"""Runs programs by a code execution service over HTTP.

Its API is the one that SandboxFusion publishes (`POST /run_code`), which `agentgym sandbox serve` speaks too.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from agentgym.errors import ConfigError, SandboxError
from agentgym.proxies import proxy_for
from agentgym.refusals import Secrets
from agentgym.tools.sandbox.protocol import Ended, Language, Outcome, SandboxLimits, SandboxSession
from agentgym.tools.sandbox.request import ExecutionRequest, Runner
from agentgym.tools.sandbox.service_settings import CONCURRENCY, KEY, SandboxConfig

__all__ = ["LANGUAGES", "ServiceSandbox"]

LANGUAGES: Mapping[Language, str] = {"python": "python", "shell": "bash"}
"""The service's names of our languages."""
ANSWER_S = 60.0
"""The seconds after a program's own limit in which the service has to answer."""
PAUSES_S = (0.5, 2.0, 8.0)
"""The seconds before each further try of a request that the service could not serve."""
MAX_BYTES = 1 << 28
"""The most bytes of an answer."""
BUSY = (429, 500, 502, 503, 504)


class ServiceSandbox(Runner):
    """A sandbox on another machine. It has no sessions, as the service keeps nothing between two programs."""

    backend = "service"

    def __init__(self, url: str, limits: SandboxLimits) -> None:
        """The number of requests at the same time and the key are those of the run."""
        super().__init__(limits)
        self._url = f"{url.rstrip('/')}/run_code"
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get(os.environ.get(KEY, "")):
            self._headers["Authorization"] = f"Bearer {key}"
        self._slots = threading.BoundedSemaphore(int(os.environ.get(CONCURRENCY) or SandboxConfig.concurrency))
        proxy = proxy_for(self._url)
        proxies = {"http": proxy, "https": proxy} if proxy else {}
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler(proxies)).open

    def session(self) -> SandboxSession:
        """Raises ConfigError: the service keeps no state."""
        raise ConfigError(
            "a code execution service keeps nothing from call to call: sessions need a box of this machine"
        )

    def _execute(self, request: ExecutionRequest) -> Outcome:
        if patterns := [path for path in request.collect if any(mark in path for mark in "*?[")]:
            raise ConfigError(
                f"a code execution service collects files by their paths, not by patterns: {patterns[0]!r}"
            )
        body = {
            "code": request.code.decode("utf-8", "replace"),
            "language": LANGUAGES[request.language],
            "compile_timeout": request.time_limit_s,
            "run_timeout": request.time_limit_s,
            "memory_limit_MB": self.limits.memory_mb,
            "files": {path: base64.b64encode(content).decode() for path, content in request.files.items()},
            "fetch_files": list(request.collect),
        }
        with self._slots:
            answer = self._ask(json.dumps(body).encode(), request.time_limit_s + ANSWER_S)
        try:
            return self._outcome(answer, request)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SandboxError(f"{self._url} answered what is not an outcome: {error!r}") from error

    def _ask(self, body: bytes, timeout_s: float) -> Mapping[str, Any]:
        """Returns the service's answer; raises SandboxError if it gives none in several tries, or refuses."""
        why = ""
        for pause_s in (*PAUSES_S, None):
            try:
                with self._open(urllib.request.Request(self._url, body, self._headers), timeout=timeout_s) as answer:
                    reply: Mapping[str, Any] = json.loads(answer.read(MAX_BYTES))
                if reply["status"] != "SandboxError":
                    return reply
                why = f"it failed: {reply.get('message')}"
            except urllib.error.HTTPError as error:
                why = f"status {error.code}: {error.read(5000).decode(errors='replace')}"
                if error.code not in BUSY:
                    break
            except TimeoutError:
                why = f"no answer within {timeout_s:g} s"
                break
            except (OSError, http.client.HTTPException) as error:
                why = str(error) or type(error).__name__
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                why = f"its answer is not that of the API: {error!r}"
                break
            if pause_s is not None:
                time.sleep(pause_s)
        why = Secrets(self._headers, {}).mask_secrets(why)[:600]
        raise SandboxError(f"the code execution service at {self._url} ran no program: {why}")

    def _outcome(self, answer: Mapping[str, Any], request: ExecutionRequest) -> Outcome:
        result = answer["run_result"] or answer["compile_result"]
        if result["status"] not in ("Finished", "TimeLimitExceeded"):
            raise ValueError(f"the program's status is {result['status']}")
        ended = Ended.EXITED if result["status"] == "Finished" else Ended.TIME_LIMIT
        exit_code, seconds = result["return_code"] if ended is Ended.EXITED else -9, result["execution_time"] or 0.0
        if type(exit_code) is not int or not 0 <= seconds < float("inf"):
            raise ValueError(f"the program ended with {exit_code!r:.40} after {seconds!r:.40} s")
        texts, left = [], self.limits.output_kb * 1024
        for name in ("stdout", "stderr"):
            text = (result[name] or "").encode()
            texts.append(text[:left].decode("utf-8", "replace"))
            left -= len(text)
        if left < 0 and ended is Ended.EXITED:
            ended = Ended.OUTPUT_LIMIT
        files = answer.get("files") or {}
        return Outcome(
            stdout=texts[0],
            stderr=texts[1],
            exit_code=exit_code,
            ended=ended,
            backend=self.backend,
            seconds=float(seconds),
            files={path: base64.b64decode(files[path], validate=True) for path in request.collect if path in files},
        )
