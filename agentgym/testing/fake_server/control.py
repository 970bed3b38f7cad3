"""The control endpoints of a fake SGLang server: server information, pauses, weights, adapters, checksums."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentgym.errors import RunFolderError
from agentgym.testing.fake_server.generate import RESERVED_TOKENS, HttpError
from agentgym.testing.fake_server.http import Endpoint, HttpAnswer, HttpCall
from agentgym.testing.fake_server.model import FakeModel
from agentgym.testing.fake_server.sampler import FakeSampler
from agentgym.testing.fake_server.weights import FakeWeights, UpdateRefused, overall

__all__ = ["VERSION", "FakeControl"]

VERSION = "0.5.23"
"""The release of SGLang that has this contract."""
MODES = ("abort", "in_place", "retract")
PARTS = ("weights", "kv_cache", "cuda_graph")
HEALTH_S = 20.0
"""The seconds after which a paused server reports that it is not healthy."""
MAX_TOTAL_TOKENS = 1 << 20
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. Retract or"
    " finish them, then call /flush_cache."
)
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
PLACE = {"tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1}


class FakeControl:
    """Answers to all requests that generate nothing; `endpoints` by path."""

    def __init__(self, model: FakeModel, sampler: FakeSampler, weights: FakeWeights) -> None:
        self.model = model
        self.sampler = sampler
        self.weights = weights
        self.version = sampler.version
        """The version in `/model_info`: an update whose flush fails does not change it."""
        self.num_updates = 0
        """The number of updates that succeeded; each bucket counts."""
        self.released: set[str] = set()
        """The parts of the memory that are released: `weights`, `kv_cache`, `cuda_graph`."""
        self.endpoints: dict[str, Endpoint] = {
            "/health": self._health,
            "/health_generate": self._health,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/v1/models": self._models,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._regain,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_tensor": self._from_tensor,
            "/update_weights_from_disk": self._from_disk,
            "/update_weight_version": self._set_version,
            "/weights_checker": self._check,
            "/load_lora_adapter": self._load_adapter,
            "/load_lora_adapter_from_tensors": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
        }

    # ---- server information

    async def _health(self, _: HttpCall) -> HttpAnswer:
        try:
            async with asyncio.timeout(HEALTH_S):
                await self.sampler.running()
        except TimeoutError:
            return HttpAnswer(None, 503)
        return HttpAnswer()

    async def _model_info(self, _: HttpCall) -> HttpAnswer:
        return HttpAnswer(self._info())

    async def _server_info(self, _: HttpCall) -> HttpAnswer:
        model = self.model
        info = self._info() | {
            "context_length": None,
            "dtype": model.dtype,
            "device": "cpu",
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "enable_lora": True,
            "skip_tokenizer_init": False,
            "status": "ready",
            "max_total_num_tokens": MAX_TOTAL_TOKENS,
            "max_req_input_len": model.context_window - RESERVED_TOKENS,
            "version": VERSION,
            "internal_states": [{"weight_version": self.version}],
        }
        return HttpAnswer(info)

    def _info(self) -> dict[str, Any]:
        folder = str(self.model.folder)
        return {
            "model_path": folder,
            "served_model_name": folder,
            "tokenizer_path": folder,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": "qwen25",
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": self.model.type,
            "architectures": self.model.architectures,
        }

    async def _models(self, _: HttpCall) -> HttpAnswer:
        name, window = str(self.model.folder), self.model.context_window
        card = {"id": name, "object": "model", "created": 0, "owned_by": "sglang", "root": name, "parent": None}
        return HttpAnswer({"object": "list", "data": [card | {"max_model_len": window}]})

    # ---- requests in flight

    async def _abort(self, call: HttpCall) -> HttpAnswer:
        self.sampler.abort(call.body.get("rid") or "", everything=bool(call.body.get("abort_all")))
        return HttpAnswer()

    async def _pause(self, call: HttpCall) -> HttpAnswer:
        mode = call.body.get("mode", "abort")
        if mode not in MODES:
            raise HttpError(400, {"object": "error", "message": f"mode is one of {MODES}, got {mode!r}", "code": 400})
        self.sampler.pause(mode)
        return HttpAnswer({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: HttpCall) -> HttpAnswer:
        self.sampler.resume()
        return HttpAnswer({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, call: HttpCall) -> HttpAnswer:
        deadline = asyncio.get_running_loop().time() + float(call.query.get("timeout", 0.0))
        while not self.sampler.can_flush():
            if asyncio.get_running_loop().time() >= deadline:
                return HttpAnswer("Flush cache failed.\n", 400)
            await asyncio.sleep(0.01)
        return HttpAnswer(FLUSHED)

    async def _release(self, call: HttpCall) -> HttpAnswer:
        if self.sampler.num_in_flight:
            raise HttpError(500, {"message": "release_memory_occupation should be called only when server is idle."})
        self.released |= set(call.body.get("tags") or PARTS)
        return HttpAnswer()

    async def _regain(self, call: HttpCall) -> HttpAnswer:
        tags = set(call.body.get("tags") or PARTS)
        if not tags <= self.released:
            raise HttpError(500, {"message": f"{sorted(tags - self.released)} were not released"})
        self.released -= tags
        return HttpAnswer()

    # ---- weights

    async def _begin(self, _: HttpCall) -> HttpAnswer:
        async with self.sampler.exclusive():
            return self._run_update(self.weights.begin)

    async def _end(self, _: HttpCall) -> HttpAnswer:
        async with self.sampler.exclusive():
            return self._run_update(self.weights.end)

    def _run_update(self, act: Callable[[], None]) -> HttpAnswer:
        try:
            act()
        except UpdateRefused as error:
            return HttpAnswer({"success": False, "message": str(error)}, 400)
        return HttpAnswer({"success": True, "message": "Success"})

    async def _from_tensor(self, call: HttpCall) -> HttpAnswer:
        def load() -> str:
            self.weights.take(call.body.get("serialized_named_tensors") or (), call.body.get("load_format"))
            return "Success"

        return await self._update(call.body, load)

    async def _from_disk(self, call: HttpCall) -> HttpAnswer:
        def load() -> str:
            try:
                self.weights.load_folder(Path(str(call.body.get("model_path"))))
            except (OSError, RunFolderError) as error:
                raise UpdateRefused(f"Failed to update weights: {error}") from error
            return "Succeeded to update model weights."

        return await self._update(call.body, load, {"num_paused_requests": 0})

    async def _update(
        self, body: Mapping[str, Any], load: Callable[[], str], more: Mapping[str, object] | None = None
    ) -> HttpAnswer:
        if body.get("abort_all_requests"):
            self.sampler.abort("", everything=True)
        if "weights" in self.released:
            raise HttpError(500, {"message": "weights are released"})
        version = body.get("weight_version")
        async with self.sampler.exclusive():
            try:
                message = load()
            except UpdateRefused as error:
                return HttpAnswer({"success": False, "message": str(error), **(more or {})}, 400)
            if version is not None:
                self.sampler.set_version(str(version))
            if body.get("flush_cache", True) and not self.sampler.can_flush():
                return HttpAnswer({"success": False, "message": NOT_FLUSHED, **(more or {})}, 400)
        self.num_updates += 1
        if version is not None:
            self.version = str(version)
            message += f" Weight version updated to {version}."
        return HttpAnswer({"success": True, "message": message, **(more or {})})

    async def _set_version(self, call: HttpCall) -> HttpAnswer:
        version = str(call.body.get("new_version"))
        if call.body.get("abort_all_requests", True):
            self.sampler.abort("", everything=True)
        self.sampler.set_version(version)
        self.version = version
        return HttpAnswer({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def _check(self, call: HttpCall) -> HttpAnswer:
        action = call.body.get("action", "checksum")
        if action != "checksum":
            return HttpAnswer({"success": False, "message": f"Unsupported action={action!r}"}, 400)
        checksums = self.weights.checksums(call.body.get("skip_tensor_list") or ())
        per_gpu, per_engine = overall(checksums)
        rank = {"checksums": checksums, "per_gpu_checksum": per_gpu, "parallelism_info": [{"role": "target", **PLACE}]}
        body = {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": per_engine}
        return HttpAnswer(body)

    # ---- adapters

    async def _load_adapter(self, call: HttpCall) -> HttpAnswer:
        name, adapters = str(call.body.get("lora_name")), self.weights.adapters
        if name in adapters:
            return self._adapters(f"LoRA with name {name} already exists. Loaded LoRAs: {list(adapters)}")
        where = call.body.get("lora_path")
        if where is None:
            try:
                tensors = self.weights.named_tensors((call.body.get("serialized_named_tensors") or [""])[0])
            except UpdateRefused as error:
                return self._adapters(str(error))
            self.weights.num_tensors += len(tensors)
            where = "__tensor__"
        elif not Path(where).is_dir():
            return self._adapters(f"no adapter folder {where!r}")
        adapters[name] = where
        return self._adapters()

    async def _unload_adapter(self, call: HttpCall) -> HttpAnswer:
        name = str(call.body.get("lora_name"))
        if name not in self.weights.adapters:
            return self._adapters(f"LoRA with name {name} does not exist.")
        async with self.sampler.exclusive():
            del self.weights.adapters[name]
        return self._adapters()

    def _adapters(self, error: str | None = None) -> HttpAnswer:
        body: dict[str, object] = {"rid": None, "http_worker_ipc": None, "success": error is None}
        body |= {"error_message": error, "loaded_adapters": dict(self.weights.adapters)}
        return HttpAnswer(body, 200 if error is None else 400)
