"""The settings of an engine's servers, of whichever kind."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import yaml

from agentgym.engines.servers.http import check_addresses
from agentgym.engines.servers.serving_settings import ServingSettings
from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_at_least

__all__ = ["ServerConfig", "ServerLaunch"]

_SEVERAL_WORDS = re.compile(r"--[\w-]+\s")


@config_class
class ServerConfig:
    """The servers that sample: those of `urls`, or `replicas` new ones that end with the engine."""

    urls: tuple[str, ...] = ()
    """Running servers, such as http://127.0.0.1:30000; none launches new ones. Each request sends the variable
    AGENTGYM_SERVER_SECRET as a bearer token (SGLang's --api-key), if it is set. vLLM needs VLLM_SERVER_DEV_MODE=1,
    --enable-scale-out, --logprobs-mode processed_logprobs and our --worker-extension-cls, as the error says."""
    embedded: bool = False
    """Runs the engine in this process, whose interpreter has its library, in place of a server."""
    replicas: int = 1
    """Servers to launch."""
    python: str = ""
    """The interpreter that has the server's library (SGLang 0.5.23, vLLM 0.32, or later); empty is the one that runs
    agentgym."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """The device of launched servers; `auto` is a GPU if there is one."""
    dtype: str = "auto"
    """The dtype of a launched server's weights: `float32`, `bfloat16`, `float16`. `auto` is that of the learner, which
    gives the least mismatch, or float32 where nothing is trained."""
    server_args: tuple[str, ...] = ()
    """Further arguments of the server's command, all in one pair of quotation marks: of `sglang.launch_server` or
    `vllm.entrypoints.openai.api_server`; if embedded, of `ServerArgs` or `AsyncEngineArgs`."""
    ready_s: float = 900.0
    """Seconds that a launched server may take to load the model."""
    serving: ServingSettings = field(default_factory=ServingSettings)

    @property
    def on_cpu(self) -> bool:
        """True if launched servers compute on the CPU."""
        return self.device == "cpu" or (self.device == "auto" and shutil.which("nvidia-smi") is None)

    @property
    def sleeps(self) -> bool:
        """True if launched servers can free a GPU's memory and take it back."""
        return self.serving.sleep and not self.on_cpu

    @property
    def weights_dtype(self) -> str:
        """The dtype that a server is launched with."""
        return "float32" if self.dtype == "auto" else self.dtype

    @property
    def arguments(self) -> dict[str, object]:
        """The further arguments by name, as an engine of this process takes them."""
        arguments: dict[str, object] = {}
        for word in self.server_args:
            if word.startswith("--"):
                name, equals, value = word.removeprefix("--").partition("=")
                is_off = name.startswith("no-") and not equals
                name = name.removeprefix("no-") if is_off else name
                arguments[name.replace("-", "_")] = yaml.safe_load(value) if equals else not is_off
            elif not arguments:
                raise ConfigError(f"server_args are --NAME VALUE words, got {word!r}")
            else:
                arguments[next(reversed(arguments))] = yaml.safe_load(word)
        return arguments

    def __post_init__(self) -> None:
        if self.embedded and (self.urls or self.python or self.replicas != 1):
            raise ConfigError("embedded is one engine in this process: leave urls, python and replicas out")
        check_at_least(1, self, "replicas")
        check_addresses(self.urls, "a server")
        words = (shlex.split(text) if _SEVERAL_WORDS.match(text) else [text] for text in self.server_args)
        object.__setattr__(self, "server_args", tuple(chain.from_iterable(words)))


@dataclass(frozen=True, kw_only=True)
class ServerLaunch(ServerConfig):
    """The servers that sample, with the folder for their logs."""

    log_folder: str
    """The folder for the logs of launched servers, which stay there."""
