"""SGLang in this process: an `sglang.Engine` with its native interface. The only file that imports sglang."""

from __future__ import annotations

import asyncio
import atexit
import importlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

from agentgym.engines.servers.gpus import visible_gpus
from agentgym.engines.servers.http import HttpRefusal, HttpUnreachable
from agentgym.errors import ConfigError, EngineError

__all__ = ["CPU_ARGUMENTS", "CPU_ENVIRONMENT", "EmbeddedSglang"]

_log = logging.getLogger(__name__)
_FREEING_S = 15.0
"""Seconds that schedulers may take to end."""
CPU_ARGUMENTS: Mapping[str, object] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "sleep_on_idle": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 65536,
}
"""The arguments of SGLang on a machine without a GPU."""
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1"}
_ORDERS = {
    "/begin_weight_update": ("BeginWeightUpdateReqInput", "begin_weight_update"),
    "/continue_generation": ("ContinueGenerationReqInput", "continue_generation"),
    "/destroy_weights_update_group": ("DestroyWeightsUpdateGroupReqInput", "destroy_weights_update_group"),
    "/end_weight_update": ("EndWeightUpdateReqInput", "end_weight_update"),
    "/init_weights_update_group": ("InitWeightsUpdateGroupReqInput", "init_weights_update_group"),
    "/load_lora_adapter_from_tensors": ("LoadLoRAAdapterFromTensorsReqInput", "load_lora_adapter_from_tensors"),
    "/release_memory_occupation": ("ReleaseMemoryOccupationReqInput", "release_memory_occupation"),
    "/resume_memory_occupation": ("ResumeMemoryOccupationReqInput", "resume_memory_occupation"),
    "/pause_generation": ("PauseGenerationReqInput", "pause_generation"),
    "/unload_lora_adapter": ("UnloadLoRAAdapterReqInput", "unload_lora_adapter"),
    "/update_weight_version": ("UpdateWeightVersionReqInput", "update_weight_version"),
    "/update_weights_from_disk": ("UpdateWeightFromDiskReqInput", "update_weights_from_disk"),
    "/update_weights_from_distributed": ("UpdateWeightsFromDistributedReqInput", "update_weights_from_distributed"),
    "/update_weights_from_tensor": ("UpdateWeightsFromTensorReqInput", "update_weights_from_tensor"),
    "/weights_checker": ("CheckWeightsReqInput", "check_weights"),
}
"""The request type and the method of the tokenizer manager for each path of a server."""


class EmbeddedSglang:
    """An `SglangTransport` on an `sglang.Engine`, which `start` makes and `close` ends.

    Requests are handled on the event loop that started it; scheduler and detokenizer are separate processes. They
    import the program's main module, so it must guard what it does (`if __name__ == "__main__":`). Only one can run at
    a time: SGLang keeps its settings for the whole process. It relies on parts of SGLang 0.5.23 that are not public.

    What `sglang.Engine` would do to the program around it is undone or left out: its event-loop policy, its logging,
    its signal handlers, ending this process if a part of SGLang fails, ending all child processes at the end.
    """

    _running: ClassVar[EmbeddedSglang | None] = None

    def __init__(self, model_folder: Path, *, on_cpu: bool, arguments: Mapping[str, object]) -> None:
        """Prepares the engine of a model folder; `arguments` are SGLang's `ServerArgs`."""
        self.model_folder = model_folder
        self.gpus: Sequence[str] = () if on_cpu else visible_gpus()
        """The GPUs that it sees, as this process does."""
        for name, value in CPU_ENVIRONMENT.items() if on_cpu else ():
            os.environ.setdefault(name, value)
        self.server_args = {**(CPU_ARGUMENTS if on_cpu else {}), **arguments}
        self._engine: Any = None
        self._types: Any = None
        self._processes: list[BaseProcess] = []
        self._schedulers: list[BaseProcess] = []
        # SGLang's processes end with the thread that started them, so it has to live as long as they do.
        self._keeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agentgym-sglang")
        self._reader: asyncio.Task[None] | None = None
        self._work: set[asyncio.Future[Any]] = set()
        self._failure: str | None = "it has not started"
        self._restore_signal: Callable[[], object] = lambda: None

    @property
    def name(self) -> str:
        """The engine's name in an error message."""
        return "the sglang in this process"

    async def start(self) -> None:
        """Loads the model, which takes a minute, and listens.

        Raises ConfigError if SGLang is not installed in this environment or runs already, EngineError if it does not
        start; nothing is left running.
        """
        if EmbeddedSglang._running is not None:
            raise ConfigError("one embedded SGLang runs in this process already: close it first, or launch servers")
        EmbeddedSglang._running = self
        loop = asyncio.get_running_loop()
        self._restore_signal = self._catch_quit(loop)
        try:
            await loop.run_in_executor(self._keeper, self._launch)
            self._listen(loop)
        except BaseException:
            await self.close()
            raise

    async def post(self, path: str, payload: Mapping[str, object], *, timeout_s: float | None = None) -> Any:
        """Returns what a server's endpoint `path` would answer; raises HttpRefusal or HttpUnreachable."""
        if path == "/generate":
            return await self._run_work(path, self._reply(payload), timeout_s)
        return await self._run_work(path, self._run_order(path, payload), timeout_s, is_order=True)

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Returns what a server's endpoint `path` would answer; raises HttpRefusal or HttpUnreachable."""
        return await self._run_work(path, self._read_info(path), timeout_s)

    async def stream(
        self, path: str, payload: Mapping[str, object], *, timeout_s: float | None = None
    ) -> AsyncIterator[Any]:
        """Yields the pieces of a reply, each the whole so far; raises HttpRefusal or HttpUnreachable."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._check(path)
        async with aclosing(self._pieces(payload)) as pieces:
            while True:
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                piece = await self._run_work(path, _next(pieces), left_s)
                if piece is None:
                    return
                yield piece

    async def close(self) -> None:
        """Ends the engine with its processes; a second call does nothing."""
        if self._failure is None:
            self._engine.tokenizer_manager._dispatch_to_scheduler(self._types.ShutdownReq())
        self._mark_failed("it is closed")
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
        left = [*self._work, *([reader] if reader is not None else [])]
        if left:
            await asyncio.wait(left)
        if EmbeddedSglang._running is self:
            await asyncio.get_running_loop().run_in_executor(self._keeper, self._end)
            self._close_sockets()
            self._restore_signal()
            self._keeper.shutdown()
            EmbeddedSglang._running = None

    # ---- the endpoints

    async def _pieces(self, payload: Mapping[str, object]) -> AsyncGenerator[Any, None]:
        request = self._types.GenerateReqInput(**payload)
        async with aclosing(self._engine.tokenizer_manager.generate_request(request, None)) as replies:
            async for piece in replies:
                yield piece

    async def _reply(self, payload: Mapping[str, object]) -> Any:
        last = None
        async for piece in self._pieces(payload):  # to its end, where it releases its locks
            last = piece
        return last

    async def _run_order(self, path: str, payload: Mapping[str, object]) -> Any:
        manager = self._engine.tokenizer_manager
        if path == "/abort_request":
            return manager.abort_request(**payload)
        if path == "/flush_cache":
            return _answer(path, await manager.flush_cache(timeout_s=0.0))
        if path not in _ORDERS:
            raise HttpRefusal(f"{self.name} has no {path}", 404)
        kind, method = _ORDERS[path]
        order = getattr(self._types, kind)(**payload)
        if path == "/update_weight_version" and order.abort_all_requests:
            manager.abort_request(abort_all=True)
        return _answer(path, await getattr(manager, method)(order))

    async def _read_info(self, path: str) -> Any:
        if path == "/model_info":
            return self._engine.get_model_info()
        if path == "/server_info":
            info = self._engine.server_args.resolved_dict()
            return {**info, **_scheduler_info(self._engine), "version": importlib.import_module("sglang").__version__}
        raise HttpRefusal(f"{self.name} has no {path}", 404)

    async def _run_work(
        self, path: str, work: Coroutine[Any, Any, Any], timeout_s: float | None, *, is_order: bool = False
    ) -> Any:
        """Returns the result of the work.

        An order continues if its caller stops waiting, as on a server: its answer must not be taken for that of the
        next one.
        """
        try:
            self._check(path)
        except HttpUnreachable:
            work.close()
            raise
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._forget)
        try:
            async with asyncio.timeout(timeout_s):
                return await (asyncio.shield(task) if is_order else task)
        except TimeoutError as error:
            raise HttpUnreachable(f"{self.name}{path} gave no answer within {timeout_s or 0:g} s") from error
        except asyncio.CancelledError:
            asking = asyncio.current_task()
            if self._failure is None or (asking is not None and asking.cancelling()):
                raise
            raise HttpUnreachable(f"{self.name}{path} cannot be reached: {self._failure}") from None
        except EngineError:
            raise
        except Exception as error:  # SGLang's code, whose errors a server would answer with
            status = getattr(error, "status_code", 400 if isinstance(error, ValueError | TypeError) else 500)
            detail = getattr(error, "detail", None) or error
            raise HttpRefusal(f"{self.name}{path} answered {status}: {detail}", status) from error

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()  # retrieves the error, also if no task waits any more

    def _check(self, path: str) -> None:
        if self._failure is not None:
            raise HttpUnreachable(f"{self.name}{path} cannot be reached: {self._failure}")

    # ---- start and end

    def _launch(self) -> None:
        """Makes the engine, on the keeper's thread: SGLang handles signals only if it is made on the main one."""
        before = set(multiprocessing.active_children())
        with _program_kept():
            try:
                module = importlib.import_module("sglang.srt.entrypoints.engine")
                self._types = importlib.import_module("sglang.srt.managers.io_struct")
            except ImportError as error:
                raise ConfigError(f"SGLang cannot be imported here ({error}): install it, or use its server") from error
            try:
                self._engine = module.Engine(model_path=str(self.model_folder), **self.server_args)
            except Exception as error:  # SGLang's code, whatever it raises
                raise EngineError(f"{self.name} did not start: {type(error).__name__}: {error}") from error
            finally:
                self._processes = [process for process in multiprocessing.active_children() if process not in before]
        atexit.unregister(self._engine.shutdown)
        watchdog = self._engine.tokenizer_manager._subprocess_watchdog
        watchdog.stop()  # we watch the processes ourselves; it would end this process
        processes = zip(watchdog._names, watchdog._processes, strict=True)
        self._schedulers = [process for name, process in processes if name.startswith("scheduler")]

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reads what the engine's processes send, and notices when one of them ends."""
        manager = self._engine.tokenizer_manager
        manager.event_loop = loop  # so that it starts no loop of its own, which would end this process on an error
        self._reader = asyncio.create_task(manager.handle_loop())
        self._reader.add_done_callback(self._reader_ended)
        self._failure = None
        for process in self._processes:
            loop.add_reader(process.sentinel, self._mark_failed, f"its process {process.pid} ended")

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            self._mark_failed(f"its answers cannot be read: {reader.exception()!r}")

    def _mark_failed(self, reason: str) -> None:
        """Marks the engine as unreachable from now on, also for tasks that wait for it."""
        if self._failure is not None:
            return
        self._failure = reason
        loop = asyncio.get_running_loop()
        for process in self._processes:
            loop.remove_reader(process.sentinel)
        for task in list(self._work):
            task.cancel()

    def _catch_quit(self, loop: asyncio.AbstractEventLoop) -> Callable[[], object]:
        """Catches SIGQUIT, with which SGLang's processes report that they fail, for as long as the engine lives.

        Its default is to end this process. Returns the function that restores it.
        """
        if threading.current_thread() is not threading.main_thread():
            _log.warning("an SGLang that fails ends this process: its signal can be caught on the main thread alone")
            return lambda: None
        reason = "it failed, as its own log says"
        before = signal.signal(signal.SIGQUIT, lambda *_: loop.call_soon_threadsafe(self._mark_failed, reason))
        return lambda: signal.signal(signal.SIGQUIT, before)

    def _end(self) -> None:
        """Waits for the schedulers, which were asked to free their memory, and ends all of the engine's processes.

        `Engine.shutdown` would end every child of this process.
        """
        deadline = time.monotonic() + _FREEING_S
        for process in self._schedulers:
            process.join(max(0.0, deadline - time.monotonic()))
        if self._processes:
            kill_tree = importlib.import_module("sglang.srt.utils").kill_process_tree
            for process in self._processes:
                kill_tree(process.pid, wait_timeout=60)
                process.join(timeout=1.0)
        if self._engine is not None:
            self._engine._attached = True  # "the processes belong to another engine": it releases the rest
            self._engine.shutdown()
            self._engine.loop.close()

    def _close_sockets(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            manager = engine.tokenizer_manager
            for socket in (manager.recv_from_detokenizer, manager.send_to_scheduler, engine.send_to_rpc):
                context = socket.context
                socket.close(linger=0)
                context.destroy(linger=0)


@contextmanager
def _program_kept() -> Iterator[None]:
    """Restores what SGLang sets for the whole process: the event-loop policy, the logging, the start method."""
    policy, root = asyncio.get_event_loop_policy(), logging.getLogger()
    handlers, level, method = root.handlers[:], root.level, multiprocessing.get_start_method(allow_none=True)
    for handler in handlers:
        root.removeHandler(handler)  # or SGLang closes them
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)
        multiprocessing.set_start_method(method, force=True)  # None: undecided
        for handler in root.handlers[:]:
            root.removeHandler(handler)
        for handler in handlers:
            root.addHandler(handler)
        root.setLevel(level)


async def _next(pieces: Any) -> Any:
    """Returns the next piece, or None at the end."""
    return await anext(pieces, None)


def _scheduler_info(engine: Any) -> Mapping[str, object]:
    info: Mapping[str, object] = engine._scheduler_init_result.scheduler_infos[0]
    return info


def _answer(path: str, result: Any) -> Any:
    """Returns a method's result as the server reports it; raises HttpRefusal for one that did not succeed."""
    if isinstance(result, tuple):
        success, message, *more = result
        answer: dict[str, Any] = {"success": success, "message": message}
        if path == "/weights_checker" and more[0] is not None:
            answer["ranks"] = more[0]
    elif result is None:
        return {"success": True}
    else:
        answer = importlib.import_module("sglang.srt.utils.msgspec_utils").msgspec_to_builtins(result)
    if answer.get("success") is False:
        refusal = answer.get("message") or answer.get("error_message")
        raise HttpRefusal(f"{path} did not succeed: {refusal}", 400)
    return answer
