"""`agentgym fake-server`: SGLang's native contract with scripted replies, timing and faults, without a GPU."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentgym.cli.options import parse_options
from agentgym.cli.signals import end_of_serving
from agentgym.cli.terminal import say
from agentgym.embedded import EMBEDDED
from agentgym.errors import ConfigError
from agentgym.model.model_name import model_folder
from agentgym.types import JSON

if TYPE_CHECKING:  # loaded where the server starts: help and mistakes need none
    from agentgym.engines.scripted import Reply
    from agentgym.testing.fake_server.faults import FaultKind
    from agentgym.testing.fake_server.server import FakeConfig

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class FakeServerOptions:
    """Serves as an SGLang server would: /generate, chat completions, weight updates, pauses, aborts. Ctrl-C ends it."""

    port: int = 30000
    """The port to listen on; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is reachable from other machines, and demands a token."""
    require_token: bool = False
    """Demand a token on loopback too. It is printed at the start, or read from AGENTGYM_TOKEN where that is set."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header that are served, besides IP addresses and this machine's own name."""
    model: str = EMBEDDED
    """Model folder that it pretends to serve: vocabulary, window, tokenizer, checksums of weights."""
    reply: str = "random"
    """random, echo, or a script file: one reply a line, a JSON list of ids or a JSON text."""
    latency_median_s: float = 0.0
    """Median seconds before a reply's first token, log-normally spread."""
    latency_sigma: float = 1.0
    """Spread of the latency's logarithm."""
    token_s: float = 0.0
    """Seconds per token."""
    slow_factor: float = 1.0
    """Multiplies all of these seconds."""
    faults: Mapping[str, JSON] = field(default_factory=dict)
    """Shares of requests that go wrong, such as error=0.01 busy=0.02: `error` is status 500, `busy` 429, `drop` a
    connection that breaks, `lengths` a logprob too few, `vocabulary` an unknown id, `hang` no answer, `abort` half a
    reply, `die` the end of the server."""
    retry_after_s: float = 0.1
    """The seconds that a busy answer asks to wait."""
    seed: int = 0
    """The seed of random replies, latencies and faults."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym fake-server ...`."""
    options = parse_options(FakeServerOptions, args, prog="agentgym fake-server")
    from agentgym.http_guard import choose_token
    from agentgym.testing.fake_server.faults import Faults
    from agentgym.testing.fake_server.server import FakeConfig

    folder = model_folder(options.model)
    faults = Faults(
        rates={cast("FaultKind", kind): _share(kind, rate) for kind, rate in options.faults.items()},
        retry_after_s=options.retry_after_s,
        slow_factor=options.slow_factor,
        seed=options.seed,
    )
    config = FakeConfig(
        model=folder,
        reply=_reply(options.reply, folder, options.seed),
        latency_median_s=options.latency_median_s,
        latency_sigma=options.latency_sigma,
        token_s=options.token_s,
        seed=options.seed,
        faults=faults,
        host=options.host,
        port=options.port,
        token=choose_token(options.host, is_required=options.require_token),
        allowed_hosts=options.allowed_hosts,
    )
    asyncio.run(_serve(config))
    return 0


def _reply(name: str, folder: Path, seed: int) -> Reply:
    from agentgym.testing.fake_server.model import FakeModel
    from agentgym.testing.fake_server.script import FileScript, echo_reply, random_reply

    model = FakeModel(folder)
    if name == "random":
        return random_reply(model, seed)
    return echo_reply if name == "echo" else FileScript(name, model)


def _share(kind: str, rate: JSON) -> float:
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise ConfigError(f"a share of requests was wanted, such as {kind}=0.01, got {kind}={rate!r}")
    return float(rate)


async def _serve(config: FakeConfig) -> None:
    """Serves until a signal; a fault that kills the server kills this process."""
    from agentgym.http_guard import shown_token
    from agentgym.rollout.hosting.gc_pause import young_garbage_only
    from agentgym.testing.fake_server.server import FakeServer

    server = FakeServer(config, on_death=lambda: os.kill(os.getpid(), signal.SIGKILL))
    url = await server.host.start()
    over = end_of_serving()
    say(f"a fake SGLang server listens on {url} (model {config.model})")
    if server.guard.token is not None:
        say(f"  token: {shown_token(server.guard.token)}    (send it as the API key: Authorization: Bearer TOKEN)")
    for line in _suggestions(url):
        say(line)
    sys.stdout.flush()
    try:
        with young_garbage_only():  # else a full collection holds up the replies of a second
            await over.wait()
    finally:
        await server.host.close()
    stats = server.stats()
    say(f"ended after {stats.requests:,} requests, {stats.tokens:,} tokens, {sum(stats.faults.values())} faults")


def _suggestions(url: str) -> Sequence[str]:
    body: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8}}
    words = str(body).replace("'", '"')
    return (
        f"  curl {url}/generate --json '{words}'",
        f"  agentgym eval --env TextGame-v0 --policy {url}",
        f"  agentgym train --env TextGame-v0 --engine sglang --server.urls {url} --parity.max-mismatch 1000",
        f"  curl {url}/fake/stats                                   # what it has seen",
        f'  curl {url}/fake/faults --json \'{{"rates": {{"error": 0.1}}}}\'  # what goes wrong from now on',
        "Ctrl-C ends it.",
    )
