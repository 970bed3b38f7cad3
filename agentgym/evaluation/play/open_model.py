"""Opens the engine that samples from a model: in this process, or on servers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence  # noqa: F401 - the command line resolves `JSON` in this module
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentgym.engines.protocol import Engine
from agentgym.engines.server_kind import SERVERS
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.settings.config_class import config_class
from agentgym.types import JSON

__all__ = ["LocalModel", "ModelOptions", "ServedModel", "open_model"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalModel:
    """The settings of a model that is computed in this process."""

    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The type of the weights; `auto` is bfloat16 on a GPU and float32 elsewhere."""
    window: int | None = None
    """The tokens of prompt and reply together; None is the model's window, as are larger numbers."""
    backend: str = "auto"
    """The code that computes the model: `auto`, `fast`, `transformers`, or the place of a class of transformers' kind,
    `path/to/file.py:Class`."""
    num_slots: int = 64
    """The requests that run at once, or as many as fit into half of the free memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The settings of a model on servers."""

    kind: str
    """The kind of the servers, by its name in `SERVERS`."""
    server: ServerConfig


@config_class
class ModelOptions:
    """The settings of the model and engine of a command that samples from one."""

    family: str | None = None
    """The chat format of the model, by a name of `agentgym tools families`, or your own as `path/to/file.py:name`, a
    function `(tokenizer)` that returns a `Renderer`; None uses its chat template."""
    chat_template: str = ""
    """A chat template that replaces the model's, such as for a base model, which has none: a file (Jinja), or `qwen3`,
    `chatml`, `llama3`, `gemma3` or `granite4`, whose marks must be tokens of the model."""
    chat_template_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking=false for Qwen3."""
    engine: str = "local"
    """The engine that samples from a model: `local` is this process; `sglang` and `vllm` are servers."""
    model_backend: str = "auto"
    """The code with which the `local` engine computes the model: `auto`, `fast`, `transformers`, or a class of your own
    that derives from one of transformers', as `path/to/file.py:Class`."""
    device: str = "cpu"
    """The device of the `local` engine: `cpu`, `cuda`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The type of the weights of the `local` engine: `auto` is bfloat16 on a GPU and float32 elsewhere."""
    context_window: int | None = None
    """The maximum number of tokens that a prompt and its reply have together, with the `local` engine; None is the
    model's window. A smaller one lets more replies be sampled at once in the memory."""
    server: ServerConfig = field(default_factory=ServerConfig)

    def model_settings(self, num_slots: int) -> LocalModel | ServedModel:
        """Returns the settings of the engine; a local one samples at most `num_slots` replies at once."""
        if self.engine != "local":
            return ServedModel(kind=self.engine, server=self.server)
        window, backend = self.context_window, self.model_backend
        return LocalModel(device=self.device, dtype=self.dtype, window=window, num_slots=num_slots, backend=backend)


async def open_model(folder: Path, how: LocalModel | ServedModel) -> Engine:
    """Returns the engine that samples from the model of a folder.

    Raises ConfigError for settings that cannot work, EngineError for a server that does not start.
    """
    if isinstance(how, ServedModel):
        return await SERVERS[how.kind].open(how.server, folder)
    return _open_local(folder, how)


def _open_local(folder: Path, how: LocalModel) -> Engine:
    from agentgym.engines.local.config import LocalEngineConfig  # here, and not above: only a model needs torch
    from agentgym.engines.local.engine import LocalEngine
    from agentgym.engines.local.kv_cache import fitting_slots
    from agentgym.model.policy import backend_line, load_policy_on
    from agentgym.model.transformers_check import check_forward

    model = load_policy_on(how.device, folder, dtype=how.dtype, backend=how.backend)
    check_forward(model, folder)
    if line := backend_line(model, folder):
        _log.info(line)
    window = min(how.window or model.context_window, model.context_window)
    fitting = fitting_slots(model, window, how.num_slots)
    if fitting < how.num_slots:
        _log.warning(
            "the key/value cache has room for %d requests of %d tokens at once, not for %d; the others wait. A smaller"
            " context window makes room for more",
            fitting,
            window,
            how.num_slots,
        )
    return LocalEngine(model, LocalEngineConfig(num_slots=fitting, window=window))
