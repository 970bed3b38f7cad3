"""`agentgym reward-server`: scores the episodes of trainings elsewhere, with any reward."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentgym.cli.options import parse_options
from agentgym.cli.scores import REWARD_SETTINGS
from agentgym.cli.signals import end_of_serving
from agentgym.cli.terminal import say
from agentgym.errors import ConfigError
from agentgym.rewards import RewardConfig, open_rewards

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class RewardServerOptions:
    """Scores the episodes that trainings elsewhere post (`--reward.remote.url`), by any reward of the settings: a model
    on a GPU of its own, a function with its libraries. Ctrl-C ends it."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    """The reward, as in training."""
    port: int = 30100
    """The port to listen on; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is reachable from other machines, and demands a token."""
    require_token: bool = False
    """Demand a token on loopback too. It is printed at the start, or read from AGENTGYM_TOKEN where that is set."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header that are served, besides IP addresses and this machine's own name."""

    def __post_init__(self) -> None:
        if not self.reward.source_names and not self.reward.parts:
            raise ConfigError("name the reward: --reward.function NAME, or --reward.model.folder MODEL")


def main(args: Sequence[str]) -> int:
    """Runs `agentgym reward-server ...`."""
    main_options = (*REWARD_SETTINGS, "port", "host", "require_token", "allowed_hosts")
    options = parse_options(RewardServerOptions, args, prog="agentgym reward-server", main_options=main_options)
    asyncio.run(_serve(options))
    return 0


async def _serve(options: RewardServerOptions) -> None:
    """Serves until a signal."""
    # Here, and not above: help and mistakes need no server.
    from agentgym.http_guard import TOKEN_VARIABLE, choose_token, shown_token
    from agentgym.rewards.server import RewardServer

    token = choose_token(options.host, is_required=options.require_token)
    over = end_of_serving()
    async with open_rewards(options.reward) as rewards:
        server = RewardServer(rewards, options.host, options.port, token=token, allowed_hosts=options.allowed_hosts)
        async with server:
            say(f"episodes are scored at {server.url}")
            key = ""
            if token is not None:
                say(f"  token: {shown_token(token)}    (set it as {TOKEN_VARIABLE} where the training runs)")
                key = f" --reward.remote.api-key-env {TOKEN_VARIABLE}"
            say(f"  agentgym train --env TextGame-v0 --reward.remote.url {server.url}/{key}")
            say("Ctrl-C ends it.")
            sys.stdout.flush()
            await over.wait()
    say(f"ended after {server.num_scored:,} episodes, and {server.num_failed:,} that could not be scored")
