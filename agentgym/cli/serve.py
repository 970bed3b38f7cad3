"""`agentgym serve`: an evaluation whose episodes are played from outside, by agents over HTTP."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from agentgym.cli.environment import load_env
from agentgym.cli.eval import finish, run_plan, stored_options
from agentgym.cli.options import env_as_option, parse_options
from agentgym.embedded import EMBEDDED
from agentgym.engines.openai.config import ChatEndpointConfig, is_url
from agentgym.envs.base.policies import POLICIES
from agentgym.errors import ConfigError
from agentgym.evaluation.play.evaluate import EvalConfig, open_evaluation
from agentgym.rollout.agents.config import AgentConfig
from agentgym.rollout.episode.history import CompactionConfig
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.tools.sandbox.service_settings import used_by_run
from agentgym.types import JSON

__all__ = ["main"]

MAIN_SETTINGS = tuple(
    "env env_kwargs policy num_tasks num_repeats seed temperature max_turns turn_tokens device context_window "
    "concurrency host port idle_s require_token public_url output resume json".split()
)
"""The settings that `--help` shows."""
CLIENT = """\
an agent, with the package `openai` (a whole one: examples/black_box_agent.py):
  client = OpenAI(base_url="{url}", api_key="{key}")
  game = client.post("/episodes", cast_to=object)
  agent = client.with_options(base_url=game["base_url"])
  reply = agent.chat.completions.create(model="policy", messages=game["messages"], tools=game["tools"])
  answer = client.post(f"/episodes/{{game['episode']}}/step", cast_to=object)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions(EvalConfig):
    """Serves held-out episodes to outside agents, and records every token.

    Agents speak OpenAI's chat completions or Responses, or Anthropic's Messages."""

    policy: str = ""
    """The model that replies: `embedded`, `embedded-large`, a model folder, a GGUF file, or an id of the Hugging Face
    hub. Left out, it is `embedded` in TextGame-v0 and LongRoad-v0, else `embedded-large`."""
    tokenizer: tyro.conf.Suppress[str] = EMBEDDED
    num_tasks: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 50
    """The number of held-out tasks: always the first ones, whatever the seed."""
    num_repeats: Annotated[int, tyro.conf.arg(aliases=["-r"])] = 1
    """Episodes of each task."""
    engine: Literal["local"] = "local"
    """The engine that samples the replies."""
    host: str = "127.0.0.1"
    """The address to listen on; any that other machines reach demands a token."""
    port: int = 8000
    """The port to listen on; 0 takes a free one."""
    idle_s: float = 120.0
    """Seconds without a request after which an agent is gone, and its episode ends as a time-out."""
    require_token: bool = False
    """Demand a token on loopback too. It is printed at the start, or read from AGENTGYM_TOKEN where that is set."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header that are served, besides IP addresses and this machine's own name."""
    public_url: str = ""
    """The URL at which agents reach the server, if they do not connect to it directly (a forwarded port)."""
    compaction: tyro.conf.Suppress[CompactionConfig] = field(default_factory=CompactionConfig)
    agent: tyro.conf.Suppress[AgentConfig] = field(default_factory=AgentConfig)
    endpoint: tyro.conf.Suppress[ChatEndpointConfig] = field(default_factory=ChatEndpointConfig)
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """The folder for the episodes and the result; by default a new one under runs/."""
    resume: bool = False
    """Resume the run in --output: serve only what is missing or failed."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""

    def to_json(self) -> dict[str, JSON]:
        """Returns the settings of the evaluation, with the mark that it was played from outside."""
        return {**EvalConfig.to_json(self), "served": True}


def main(args: Sequence[str]) -> int:
    """Runs `agentgym serve ...`; exit code 1 when no episode could be played."""
    args = env_as_option(args)
    default = stored_options(ServeOptions, args)
    options = parse_options(ServeOptions, args, prog="agentgym serve", default=default, main_options=MAIN_SETTINGS)
    if options.policy in POLICIES:
        raise ConfigError(
            f"--policy {options.policy} plays by itself: serve a model, `embedded` or the folder of one, or evaluate "
            f"the policy with `agentgym eval --policy {options.policy}`"
        )
    if is_url(options.policy):
        raise ConfigError(f"--policy {options.policy} is a chat endpoint already: an agent can talk to it directly")
    # Here, and not above: help and mistakes need no server.
    from agentgym.http_guard import choose_token, shown_token
    from agentgym.rollout.serving.http_server import EpisodeServer, ServeConfig
    from agentgym.rollout.serving.served_loop import ServedLoop

    config = ServeConfig(
        host=options.host,
        port=options.port,
        idle_s=options.idle_s,
        token=choose_token(options.host, is_required=options.require_token),
        allowed_hosts=options.allowed_hosts,
        public_url=options.public_url,
    )

    @asynccontextmanager
    async def driver(loop: RolloutLoop) -> AsyncIterator[RolloutLoop]:
        served = ServedLoop(loop, idle_s=config.idle_s)
        async with EpisodeServer(served, config) as server:
            # standard error: the last line of standard output is the result
            print(f"serving {len(plan.to_play)} episodes of {options.env} at {server.url}", file=sys.stderr)
            key = "none" if config.token is None else shown_token(config.token)
            if config.token is not None:
                print(f"token: {key}    (agents send it as their API key)", file=sys.stderr)
            print(CLIENT.format(url=server.url, key=key), file=sys.stderr, flush=True)
            yield served

    with used_by_run(options.sandbox):
        load_env(options.env, options.env_kwargs).close()
        plan = open_evaluation(options, options.output, resume=options.resume)
        return finish(run_plan(plan, driver), as_json=options.json)
