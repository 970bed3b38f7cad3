"""Starts an agent for each episode of a run, and makes how it ends the episode's status."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from agentgym.errors import AgentGymError, ConfigError, describe_error
from agentgym.openai_wire import message_to_openai
from agentgym.rollout.agents.agent_episode import AgentEpisode
from agentgym.rollout.agents.agents import Agent, open_agent
from agentgym.rollout.agents.agents_folder import agents_folder
from agentgym.rollout.agents.config import AgentConfig
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.serving.agent_session import AgentSession, EpisodeEnded, FinishRequest, Opening
from agentgym.rollout.serving.http_server import EpisodeServer, ServeConfig
from agentgym.rollout.serving.served_loop import ServedLoop
from agentgym.trajectory import Status

__all__ = ["launched_agents"]

logger = logging.getLogger(__name__)

CLAIM_S = 3600.0
GRACE_S = 5.0
"""The seconds that an agent has to end by itself after its episode."""
RESET_S = 120.0
"""The seconds of an episode before its agent starts, beyond those of the agent."""


@asynccontextmanager
async def launched_agents(loop: RolloutLoop, config: AgentConfig, folder: Path) -> AsyncIterator[ServedLoop]:
    """Yields a loop whose episodes are played by agents that are started for them, as `loop` would play them.

    What an agent prints is kept in `folder`. All agents are ended with the context. Raises as `open_agent` does, and
    ConfigError if agents cannot reach the server.
    """
    agent = open_agent(config)
    served = ServedLoop(loop, idle_s=2 * config.timeout_s, credit=config.credit)
    served.limits = replace(served.limits, deadline_s=config.timeout_s + RESET_S)
    # Only we know the token: an agent can play its own episode and claim none.
    settings = ServeConfig(port=0, token=secrets.token_urlsafe(), idle_s=served.idle_s, quiet_s=0.0)
    async with AsyncExitStack() as stack:
        homes = stack.enter_context(agents_folder())
        server = await stack.enter_async_context(EpisodeServer(served, settings))
        await _check_reachable(server.url)
        launcher = Launcher(served, agent, server.url, config.timeout_s, folder, homes)
        workers = [asyncio.create_task(launcher.work()) for _ in range(config.parallel)]
        try:
            yield served
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await launcher.close()


async def _check_reachable(url: str) -> None:
    address = urlsplit(url)
    try:
        # An address may be bound, and lead nowhere: in a network namespace whose loopback is down.
        _, writer = await asyncio.wait_for(asyncio.open_connection(address.hostname, address.port), 10)
    except OSError as error:
        raise ConfigError(
            f"agents cannot reach the server of their episodes at {url}: {describe_error(error)}"
        ) from error
    writer.close()


class Launcher:
    """Claims episodes, and has an agent play each."""

    def __init__(self, served: ServedLoop, agent: Agent, url: str, timeout_s: float, folder: Path, homes: Path) -> None:
        """`folder` has what agents print, and `homes` a folder for each while it plays."""
        self.served, self.agent, self.url, self.timeout_s = served, agent, url, timeout_s
        self.folder, self.homes = folder, homes
        self._cleanups: set[asyncio.Task[None]] = set()
        """The agents that are being ended."""

    async def work(self) -> None:
        """Plays one episode after the other, until the run is over."""
        while True:
            try:
                opening = await self.served.claim(CLAIM_S)
            except EpisodeEnded:
                return
            session = None if opening is None else self.served.session(opening.episode)
            if opening is not None and session is not None:
                await self._play(opening, session)

    async def close(self) -> None:
        """Waits until all agents are ended."""
        await asyncio.gather(*self._cleanups)

    async def _play(self, opening: Opening, session: AgentSession) -> None:
        """Has a new agent play the episode, and ends both."""
        try:
            folder = Path(tempfile.mkdtemp(dir=self.homes))
        except OSError as error:
            await _finish(
                session, FinishRequest(Status.AGENT_ERROR, f"no folder for an agent: {describe_error(error)}")
            )
            return
        episode = AgentEpisode(
            name=session.label,
            prompt="\n\n".join(message.content for message in opening.messages),
            messages=[message_to_openai(message) for message in opening.messages],
            tools=[tool.to_openai() for tool in opening.tools],
            root_url=f"{self.url}/episodes/{opening.episode}",
            api_key=opening.episode,
            window=self.served.window,
            turn_tokens=self.served.turn_tokens,
            folder=folder,
        )
        playing = asyncio.create_task(self.agent.play(episode, self.folder / f"{session.label}.log"))
        try:
            finish = await self._end(playing, session)
            await _finish(session, finish)
        finally:
            cleanup = asyncio.create_task(_end_agent(playing, folder))
            self._cleanups.add(cleanup)
            cleanup.add_done_callback(self._cleanups.discard)
            await asyncio.shield(cleanup)

    async def _end(self, playing: asyncio.Task[str], session: AgentSession) -> FinishRequest:
        """Waits for the end of the agent or of its episode; returns how the agent has ended."""
        ended = asyncio.create_task(session.ended.wait())
        try:
            await asyncio.wait({playing, ended}, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not playing.done():
                await asyncio.wait({playing}, timeout=GRACE_S)
        finally:
            ended.cancel()
        if not playing.done():
            late = f"the agent took over {self.timeout_s:g} s (agent.timeout_s)"
            return FinishRequest(Status.TIMEOUT, late)
        try:
            failure = playing.result()
        except Exception as error:  # noqa: BLE001 - the boundary around an agent: no program, no disk
            failure = f"the agent could not be run: {describe_error(error)}"
        return FinishRequest(Status.AGENT_ERROR, failure) if failure else FinishRequest(is_exit=True)


async def _end_agent(playing: asyncio.Task[str], folder: Path) -> None:
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _finish(session: AgentSession, request: FinishRequest) -> None:
    try:
        await session.step(request)
    except AgentGymError as error:  # the episode ended otherwise meanwhile, and its record says how
        logger.debug("episode %s: %s", session.name, error)
