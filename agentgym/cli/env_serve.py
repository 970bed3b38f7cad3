"""`agentgym env serve`: serves an environment over OpenEnv's protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from agentgym.cli.environment import load_env
from agentgym.cli.options import env_as_argument, parse_options
from agentgym.cli.terminal import say
from agentgym.envs.adapters.openenv_server import openenv_app, serve_openenv
from agentgym.envs.catalog.resolve import resolve_env
from agentgym.errors import ConfigError
from agentgym.http_guard import HttpGuard, choose_token, shown_token
from agentgym.types import JSON

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class ServeEnvOptions:
    """Serves an environment over OpenEnv's HTTP and WebSocket protocol, until it is interrupted."""

    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """Environment id, package.module:Class or path/to/file.py:Class."""
    env_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    """Keywords of the environment's class, such as level=2."""
    host: str = "127.0.0.1"
    """The address to listen on; any that other machines reach demands a token."""
    port: int = 8000
    """The port to listen on; 0 takes a free one."""
    max_sessions: int = 64
    """Sessions at a time, each with an environment of its own."""
    require_token: bool = False
    """Demand a token on loopback too. It is printed at the start, or read from AGENTGYM_TOKEN where that is set."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header that are served, besides IP addresses and this machine's own name."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535 or self.max_sessions < 1:
            raise ConfigError(
                f"a port is from 0 to 65535 and max_sessions at least 1, got {self.port} and {self.max_sessions}"
            )


def main(args: Sequence[str]) -> int:
    """Runs `agentgym env serve ...`."""
    options = parse_options(ServeEnvOptions, env_as_argument(args), prog="agentgym env serve")
    load_env(options.env, options.env_kwargs).close()  # a fault is reported before a client asks

    token = choose_token(options.host, is_required=options.require_token)
    guard = HttpGuard(options.host, token=token, allowed_hosts=options.allowed_hosts)

    def ready(url: str) -> None:
        say(f"{options.env} is served at {url} (OpenEnv: /ws, /reset, /step, /state, /schema, /metadata, /health)")
        if token is None:
            say(f"play it: agentgym play openenv/{url}    an OpenEnv client: GenericEnvClient(base_url={url!r})")
        else:
            token_text = shown_token(token)
            say(f"token: {token_text}    (Authorization: Bearer TOKEN, or the password of Authorization: Basic)")
            say(f"  agentgym finds it in the environment: OPENENV_API_KEY={token_text} agentgym play openenv/{url}")
            say(f"  an OpenEnv client: GenericEnvClient(base_url={url.replace('//', f'//token:{token_text}@', 1)!r})")

    app = openenv_app(options.env, resolve_env(options.env, options.env_kwargs), options.max_sessions, guard=guard)
    try:
        asyncio.run(serve_openenv(app, options.host, options.port, ready))
    except KeyboardInterrupt:
        say("Left.")
    return 0
