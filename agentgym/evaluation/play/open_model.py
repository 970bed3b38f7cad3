"""Opens the engine that samples from a model: in this process, or on servers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentgym.engines.protocol import Engine
from agentgym.engines.server_kind import SERVERS
from agentgym.engines.servers.server_config import ServerConfig

__all__ = ["LocalModel", "ServedModel", "open_model"]

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
            *(fitting, window, how.num_slots),
        )
    return LocalEngine(model, LocalEngineConfig(num_slots=fitting, window=window))
