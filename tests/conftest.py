"""Fixtures that several floors use."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import io
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import setuptools  # noqa: F401 - torch's compiler finds its distutils only where it came first
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import agentgym.chat_templates
from agentgym.tools.calling.background_loop import BackgroundLoop
from agentgym.trainers.settings.held_out import HeldOutConfig

if TYPE_CHECKING:
    from agentgym.trainers.config import TrainConfig
    from agentgym.trainers.loop.trainer import TrainResult
    from agentgym.trainers.monitoring.metrics import StepMetrics
    from agentgym.trajectory import Trajectory

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell has it for what it began in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@pytest.fixture(scope="session", autouse=True)
def engines_run_uncompiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hides the C++ compiler from engines that choose themselves whether to compile, in child processes too.

    A compilation costs 4 to 10 CPU seconds. Real servers keep the compiler. A test of compilation deletes CXX.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not any(test.get_closest_marker("engine") for test in request.session.items):
            patch.setenv("CXX", "/hidden/by/the/tests")
        yield


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that `agentgym train` finished: two steps of three groups of four, two evaluations of eight
    episodes, a checkpoint after each step. What the command printed is in `finished.stdout` and `finished.stderr`, its
    siblings.

    All tests share it, those of other xdist workers too: read it, and copy it (`shutil.copytree`) before you change it.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    run, done = folder / "finished", folder / "finished.done"
    with (folder / "finished.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            finish_run(run)
            done.touch()
    return run


def finish_run(run: Path) -> None:
    from agentgym.cli.main import main  # here, and not above: only those who train need torch

    words = "--steps 2 --tasks 3 --group-size 4 --eval.episodes 8 --checkpoint.every 1 --optimizer.learning-rate 1e-3"
    settings = ["--env", "TextGame-v0", "--env-kwargs", "level=1", *words.split(), "--output", str(run), "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.redirect_stderr(io.StringIO()) as stderr:
        status = main(["train", *settings])
    assert status == 0, stderr.getvalue()
    for stream, printed in (("stdout", stdout), ("stderr", stderr)):
        run.with_suffix(f".{stream}").write_text(printed.getvalue(), encoding="utf-8")


@pytest.fixture(scope="session")
def has_ended() -> Callable[[psutil.Process], bool]:
    """Says whether a process is gone; one that nobody reaped is."""

    def ended(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:  # between the two looks
            return True

    return ended


@pytest.fixture(scope="session")
def docker_address() -> Iterator[str]:
    """A Docker daemon of the tests' own, which DOCKER_HOST names as long as it is there."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.fail("tests with the mark docker are run by root, with dockerd: apt-get install docker.io iproute2")
    spec = importlib.util.spec_from_file_location("agentgym_test_daemon", Path(__file__).parent / "docker/daemon.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = os.environ.pop("DOCKER_HOST", None)
    with module.docker_daemon() as address:
        os.environ["DOCKER_HOST"] = address
        yield address
    del os.environ["DOCKER_HOST"]
    if before is not None:
        os.environ["DOCKER_HOST"] = before


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level ChatML tokenizer, and no model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    template = (Path(agentgym.chat_templates.__file__).parent / "embedded.jinja").read_text(encoding="utf-8")
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@dataclass
class Answer:
    """One answer of a test endpoint: a reply, or a status with a JSON body, or a connection that breaks."""

    content: str = ""
    calls: Sequence[tuple[str, str, str]] = ()
    """Id, name and the text of the arguments."""
    reasoning: str = ""
    finish: str = "stop"
    usage: tuple[int, int, int] | None = (10, 4, 3)
    """Prompt, cached and sampled tokens."""
    ids: tuple[Sequence[int], Sequence[int]] | None = None
    """Prompt and sampled ids, as vLLM returns them."""
    status: int = 200
    body: object = None
    headers: dict[str, str] = field(default_factory=dict)
    breaks: bool = False
    """Whether the connection is dropped after the first word."""
    hangs: bool = False


Script = Callable[[dict[str, Any], int], Answer]


class Endpoint:
    """Chat completions on a thread of their own, as a script says: `script(body, number)` gives each answer."""

    def __init__(self, script: Script, models: object = ("test-model",)) -> None:
        self.script = script
        self.models = models
        self.key: str | None = None
        self.busy = 0
        """Requests for the list of models that are answered with 429."""
        self.refused: tuple[str, ...] = ()
        """Fields of a request that are answered with 400."""
        self.streams = True
        """False answers at once, whatever is asked for."""
        self.bodies: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._background = BackgroundLoop("endpoint")

    def start(self, port: int = 0) -> Endpoint:
        self._background.submit(self._begin(port)).result(10)
        return self

    def stop(self) -> None:
        self._background.submit(self._end()).result(10)
        self._background.close(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def _begin(self, port: int) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self._port = self._runner.addresses[0][1]

    async def _end(self) -> None:
        await self._runner.cleanup()
        hanging = asyncio.all_tasks() - {asyncio.current_task()}
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)

    def _denied(self, request: web.Request) -> web.Response | None:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.key is None or key == self.key:
            return None
        return web.json_response({"error": {"message": f"Incorrect API key provided: {key}"}}, status=401)

    async def _list(self, request: web.Request) -> web.Response:
        if self.busy > 0:
            self.busy -= 1
            return web.json_response({"error": "busy"}, status=429)
        if self.models is None:
            return web.json_response({"error": "no such path"}, status=404)
        listed = [{"id": name, "object": "model"} if isinstance(name, str) else name for name in self.models]  # type: ignore[attr-defined]
        return self._denied(request) or web.json_response({"object": "list", "data": listed})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
        denied = self._denied(request)
        if denied is not None:
            return denied
        for name in self.refused:
            if name in body:
                return web.json_response({"error": {"message": f"Unrecognized argument: {name}"}}, status=400)
        reply = self.script(body, number)
        if reply.hangs:
            await asyncio.sleep(3600)
        if reply.status != 200:
            return web.json_response(reply.body, status=reply.status, headers=reply.headers)
        if body.get("stream") and self.streams:
            return await self._stream(request, reply, body)
        if reply.breaks:
            request.transport.close()  # type: ignore[union-attr]
            raise ConnectionResetError
        prompt = {} if reply.ids is None else {"prompt_token_ids": list(reply.ids[0])}
        return web.json_response({"choices": [self._choice(reply, "message")], **prompt, **self._usage(reply)})

    async def _stream(self, request: web.Request, reply: Answer, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: object) -> None:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())

        whole = self._choice(reply, "delta")
        delta = whole["delta"]
        await response.write(b": a comment that keeps the connection alive\n\n")
        for name in ("reasoning_content", "content"):
            for character in delta.get(name) or "":
                await send({"choices": [{"index": 0, "delta": {name: character}}]})
                if reply.breaks:
                    request.transport.close()  # type: ignore[union-attr]
                    return response
        for index, call in enumerate(delta.get("tool_calls", ())):
            head = {**call, "index": index, "function": {"name": call["function"]["name"], "arguments": ""}}
            await send({"choices": [{"index": 0, "delta": {"tool_calls": [head]}}]})
            for character in call["function"]["arguments"]:
                part = {"index": index, "function": {"arguments": character}}
                await send({"choices": [{"index": 0, "delta": {"tool_calls": [part]}}]})
        if reply.ids is not None:
            await send({"choices": [], "prompt_token_ids": list(reply.ids[0])})
        await send({"choices": [{**whole, "delta": {}}]})
        if body.get("stream_options", {}).get("include_usage"):
            await send({"choices": [], **self._usage(reply)})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    def _choice(reply: Answer, name: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.content or None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": called, "arguments": arguments}}
                for call_id, called, arguments in reply.calls
            ]
        choice = {"index": 0, name: message, "finish_reason": "tool_calls" if reply.calls else reply.finish}
        if reply.ids is None:
            return choice
        logprobs = {"content": [{"token": "", "logprob": -0.5} for _ in reply.ids[1]]}
        return {**choice, "token_ids": list(reply.ids[1]), "logprobs": logprobs}

    @staticmethod
    def _usage(reply: Answer) -> dict[str, Any]:
        if reply.usage is None:
            return {}
        prompt, cached, sampled = reply.usage
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": sampled, **details}}


@pytest.fixture
def chat_endpoint() -> Iterator[Callable[..., Endpoint]]:
    """`chat_endpoint(script)` starts an `Endpoint`; `chat_endpoint.make_reply(content="Hi")` makes an answer of it."""
    running: list[Endpoint] = []

    def start(script: Script, *, models: object = ("test-model",), port: int = 0) -> Endpoint:
        running.append(Endpoint(script, models).start(port))
        return running[-1]

    start.make_reply = Answer  # type: ignore[attr-defined]  # test modules cannot import each other
    yield start
    for endpoint in running:
        endpoint.stop()


class Watcher:
    """Keeps what a trainer reports."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.steps: list[StepMetrics] = []
        self.played = 0

    def on_phase(self, name: str, episodes: int) -> None:
        self.phases.append(name)

    def on_episode(self, trajectory: Trajectory) -> None:
        self.played += 1

    def on_step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)


@pytest.fixture
def small_run() -> TrainConfig:
    """Two steps of the easiest game, in seconds, with steps large enough to show."""
    from agentgym.trainers.config import TrainConfig  # here, and not above: only those who train need torch
    from agentgym.trainers.settings.optimizer import OptimizerConfig

    return TrainConfig(
        env="TextGame-v0",
        env_kwargs={"level": 1},
        steps=2,
        tasks=3,
        group_size=4,
        eval=HeldOutConfig(episodes=0),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )


@pytest.fixture
def train() -> Callable[..., tuple[TrainResult, Watcher]]:
    """`train(config, folder, resume=False)` is a whole run: its result, and the `Watcher` of it."""
    from agentgym.trainers.loop.trainer import Trainer  # here, and not above: only those who train need torch

    def run(config: TrainConfig, folder: Path, *, resume: bool = False) -> tuple[TrainResult, Watcher]:
        watcher = Watcher()
        return Trainer(config, folder, watcher, resume=resume).fit(), watcher

    return run
