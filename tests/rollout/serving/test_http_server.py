"""Agents that speak HTTP: recorded exactly, told apart, and nothing sampled or stepped twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.embedded import embedded_folder
from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import ScriptedEngine, ScriptedReply
from agentgym.engines.servers.http import HttpClient, HttpRefusal
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import ConfigError
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.model.model_folder import load_decoder
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.hosting.env_host import make_task_env
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.rollout.sampling.sampler import Sampler, SamplerConfig
from agentgym.rollout.serving.http_server import EpisodeServer, ServeConfig
from agentgym.rollout.serving.served_loop import ServedLoop
from agentgym.rollout.serving.wires.wire import CONTEXT_EXCEEDED
from agentgym.tools import tool
from agentgym.trajectory import Source, Status, StopReason, Trajectory
from agentgym.types import Task

Raw = Callable[[str], list[int]]
JsonObject = dict[str, Any]
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "dial", "arguments": {"digit": %s}}\n</tool_call>' + END
QUIET = ServeConfig(port=0, quiet_s=0.0)


class Dial(ToolEnv):
    """A lock that opens at the digit of the seed."""

    runs_inline = True
    system_prompt = "Open the lock."
    max_turns = 6

    def start(self, options: dict[str, Any]) -> str:
        self.code = int(self.np_random.integers(10))
        return f"Lock {int(self.np_random.integers(10**6))}."

    @tool
    def dial(self, digit: int) -> str:
        """Dials a digit."""
        if digit == self.code:
            self.end(success=True, reward=1.0)
        return f"dialled {digit}"


class Chat(TextEnv):
    """Answers with the number of the turn; ends after three."""

    runs_inline = True
    system_prompt = "Count."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return f"seed {seed}", {}

    def step(self, action: str) -> StepResult:
        return f"turn {self.turns}", 0.5, self.turns == 3, False, {}


class Agent:
    """An agent outside: it claims an episode, and passes on what it gets unless a test makes it do otherwise."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = HttpClient(url)
        self.opening: JsonObject = {}
        self.messages: list[JsonObject] = []

    async def __aenter__(self) -> Agent:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()

    async def claim(self) -> bool:
        self.opening = await self.http.post("/episodes", {})
        self.messages = list(self.opening["messages"])
        return True

    def request(self, **fields: object) -> JsonObject:
        return {"model": "policy", "messages": self.messages, "tools": self.opening["tools"], **fields}

    async def ask(self, **fields: object) -> JsonObject:
        path = f"/episodes/{self.opening['episode']}/v1/chat/completions"
        completion: JsonObject = await self.http.post(path, self.request(**fields))
        return completion

    async def chat(self, **fields: object) -> JsonObject:
        completion = await self.ask(**fields)
        self.messages.append(completion["choices"][0]["message"])
        return completion

    async def step(self, **fields: object) -> JsonObject:
        answer: JsonObject = await self.http.post(f"/episodes/{self.opening['episode']}/step", fields)
        return answer

    async def play_on(self) -> JsonObject:
        while True:
            await self.chat()
            answer = await self.step(message=self.messages[-1])
            self.messages += answer["messages"]
            if answer["terminated"] or answer["truncated"]:
                return answer


async def relay(url: str) -> int:
    """Plays episodes as they come, until there are none; how many."""
    async with Agent(url) as agent:
        for count in range(10**6):
            try:
                await agent.claim()
            except HttpRefusal as refusal:
                assert refusal.status == 410
                return count
            await agent.play_on()
    return 0


@asynccontextmanager
async def served(loop: RolloutLoop) -> AsyncIterator[tuple[ServedLoop, str]]:
    served_loop = ServedLoop(loop)
    async with EpisodeServer(served_loop, QUIET) as server:
        yield served_loop, server.url


def dialling(raw: Raw, **settings: Any) -> ScriptedEngine:
    """Dials a digit that follows from the request's seed."""

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        return raw(CALL % (sampling.seed % 10))

    return ScriptedEngine(reply, **settings)


def episodes(env: str, count: int) -> list[Episode]:
    return [Episode(Task(env, seed), f"0/{seed}", 0) for seed in range(count)]


def lines(folder: Path, trajectories: Sequence[Trajectory]) -> bytes:
    folder.mkdir(exist_ok=True)
    with EpisodeWriter(folder) as writer:
        writer.write(trajectories)
    return (folder / "episodes.jsonl").read_bytes()


def play(
    renderer: Renderer,
    engine: ScriptedEngine,
    env: TextEnv,
    agent: Callable[[Agent], Awaitable[None]],
    limits: Limits | None = None,
) -> Trajectory:
    """One episode that `agent` plays."""

    async def run() -> Trajectory:
        async with served(RolloutLoop(engine, renderer, limits)) as (served_loop, url), Agent(url) as client:
            playing = asyncio.ensure_future(served_loop.run(env, Episode(Task("Env-v0", 7))))
            await client.claim()
            await agent(client)
            return await playing

    trajectory = asyncio.run(run())
    assert not engine.sessions, "the session was not released"
    return trajectory


def scripted(raw: Raw, *texts: str) -> ScriptedEngine:
    """Says these one after the other, each with the end mark; the last one for ever."""
    replies = iter(texts)
    return ScriptedEngine(lambda *_: raw(next(replies, texts[-1]) + END))


# ---- a faithful relay leaves the record that the loop leaves by itself


def test_a_relay_of_64_episodes_at_once_leaves_the_record_of_the_loop(
    renderer: Renderer, raw: Raw, tmp_path: Path
) -> None:
    dispatched = episodes("Dial-v0", 64)

    async def by_itself() -> list[Trajectory]:
        sampler = Sampler(RolloutLoop(dialling(raw), renderer), lambda task: Dial())
        return await sampler.run(dispatched)

    async def from_outside() -> list[Trajectory]:
        engine = dialling(raw, delay_s=0.001)
        async with served(RolloutLoop(engine, renderer)) as (loop, url):
            agents = [asyncio.ensure_future(relay(url)) for _ in range(64)]
            played = await Sampler(loop, lambda task: Dial(), SamplerConfig(concurrency=64)).run(dispatched)
            loop.end()
            assert sum(await asyncio.gather(*agents)) == 64
        assert not engine.sessions
        return played

    own = asyncio.run(by_itself())
    assert {trajectory.status for trajectory in own} == {Status.COMPLETED, Status.TRUNCATED}
    assert lines(tmp_path / "other", asyncio.run(from_outside())) == lines(tmp_path / "one", own)


@pytest.mark.long
def test_the_embedded_model_plays_the_same_game_through_a_relay(tmp_path: Path) -> None:
    renderer = renderer_for(embedded_folder())
    limits = Limits(max_turns=40, turn_tokens=64)
    dispatched = [Episode(Task("TextGame-v0", seed), f"0/{seed}", 0) for seed in range(8)]

    async def run(outside: bool) -> list[Trajectory]:
        engine = LocalEngine(load_decoder(embedded_folder()), LocalEngineConfig(num_slots=8))
        loop = RolloutLoop(engine, renderer, limits)
        try:
            if not outside:
                return await Sampler(loop, make_task_env).run(dispatched)
            async with served(loop) as (served_loop, url):
                agents = [asyncio.ensure_future(relay(url)) for _ in range(5)]
                played = await Sampler(served_loop, make_task_env).run(dispatched)
                served_loop.end()
                assert sum(await asyncio.gather(*agents)) == 8
                return played
        finally:
            await engine.close()

    own = lines(tmp_path / "one", asyncio.run(run(outside=False)))
    assert lines(tmp_path / "other", asyncio.run(run(outside=True))) == own
    assert verify_run(tmp_path / "other", renderer).ok


def test_a_text_environment_and_malformed_calls_pass_through(renderer: Renderer, raw: Raw, tmp_path: Path) -> None:
    texts = ("one", "<tool_call>{broken</tool_call>", "")
    own = asyncio.run(RolloutLoop(scripted(raw, *texts), renderer).run(Chat(), Episode(Task("Env-v0", 7))))

    async def agent(client: Agent) -> None:
        await client.play_on()

    outside = play(renderer, scripted(raw, *texts), Chat(), agent)
    assert lines(tmp_path / "other", [outside]) == lines(tmp_path / "one", [own])


# ---- requests that come twice, or at the wrong time


def refusal(status: int, code: str | None) -> Callable[[HttpRefusal], bool]:
    return lambda error: error.status == status and (code is None or f'"code": "{code}"' in str(error))


def test_a_step_that_is_repeated_gets_the_recorded_answer(renderer: Renderer, raw: Raw) -> None:
    engine = dialling(raw)

    async def agent(client: Agent) -> None:
        client.messages.append((await client.ask())["choices"][0]["message"])
        answer = await client.step()
        assert answer == await client.step() == await client.step(message=client.messages[-1])
        client.messages += answer["messages"]
        last = await client.play_on()
        assert last == await client.step()

    trajectory = play(renderer, engine, Dial(), agent)
    assert len(trajectory.turns) == engine.num_requests
    assert len(trajectory.rows) == 1


def test_equal_requests_are_samples_unless_a_header_says_that_one_is_a_retry(renderer: Renderer, raw: Raw) -> None:
    engine = dialling(raw)

    async def agent(client: Agent) -> None:
        first, second = await asyncio.gather(client.ask(), client.ask())
        assert first["id"] != second["id"] and engine.num_requests == 2
        http = HttpClient(client.url, headers={"X-Stainless-Retry-Count": "1"})
        path = f"/episodes/{client.opening['episode']}/v1/chat/completions"
        assert await http.post(path, client.request()) == second and engine.num_requests == 2
        await http.close()
        client.messages.append(first["choices"][0]["message"])
        client.messages += (await client.step(message=client.messages[-1]))["messages"]
        await client.play_on()

    trajectory = play(renderer, engine, Dial(), agent)
    assert len(trajectory.turns) == engine.num_requests
    spans = [span for row in trajectory.rows for span in row.spans if span.source is Source.POLICY]
    assert [span.excluded for span in spans if span.excluded] == ["unused"]


async def in_flight(engine: ScriptedEngine) -> None:
    """Returns when the engine has been asked for a reply."""
    while not engine.num_requests:
        await asyncio.sleep(0.001)


def test_requests_of_one_episode_are_in_flight_together(renderer: Renderer, raw: Raw) -> None:
    engine = dialling(raw)

    async def agent(client: Agent) -> None:
        await engine.pause()
        asking = asyncio.ensure_future(client.ask())
        others = [{"model": "policy", "messages": [{"role": "user", "content": text}]} for text in ("one", "two")]
        path = f"/episodes/{client.opening['episode']}/v1/chat/completions"
        side = [asyncio.ensure_future(client.http.post(path, body)) for body in others]
        while engine.num_requests < 3:
            await asyncio.sleep(0.001)
        await engine.resume()
        await asyncio.gather(*side)
        client.messages.append((await asking)["choices"][0]["message"])
        client.messages += (await client.step(message=client.messages[-1]))["messages"]
        await client.play_on()

    trajectory = play(renderer, engine, Dial(), agent)
    assert [row.origin and row.origin.label for row in trajectory.rows] == [None, "side", "side"]
    assert len(trajectory.turns) == engine.num_requests


def test_an_agent_that_drops_its_connection_finds_its_reply_when_it_is_back(renderer: Renderer, raw: Raw) -> None:
    engine = dialling(raw)

    async def agent(client: Agent) -> None:
        await engine.pause()
        async with Agent(client.url) as lost:
            lost.opening, lost.messages = client.opening, client.messages
            asking = asyncio.ensure_future(lost.ask())
            await in_flight(engine)
            asking.cancel()
        again = asyncio.ensure_future(client.ask())
        await engine.resume()
        await again
        assert engine.num_requests == 1
        await client.play_on()

    assert play(renderer, engine, Dial(), agent).status.trainable


def test_the_deadline_counts_from_the_claim_and_is_sent_to_the_agent(renderer: Renderer, raw: Raw) -> None:
    async def agent(client: Agent) -> None:
        with pytest.raises(HttpRefusal, check=refusal(410, "deadline")):
            await client.ask()

    trajectory = play(renderer, dialling(raw, delay_s=60.0), Dial(), agent, Limits(deadline_s=0.2))
    assert trajectory.status is Status.TIMEOUT and "deadline_s" in str(trajectory.error)


# ---- agents with a mind of their own


@pytest.mark.parametrize("change", ["strip", "reasoning", "arguments"])
def test_what_clients_do_to_an_assistant_message_on_its_way_back_rewrites_nothing(
    renderer: Renderer, raw: Raw, change: str
) -> None:
    def back(message: JsonObject) -> JsonObject:
        if change == "strip":
            message["content"] = (message["content"] or "").strip()
        if change == "reasoning":
            del message["reasoning_content"]
        if change == "arguments":
            call = message["tool_calls"][0]["function"]
            call["arguments"] = json.dumps(json.loads(call["arguments"]), indent=2)
        return message

    async def agent(client: Agent) -> None:
        for _ in range(3):
            completion = await client.chat()
            client.messages[-1] = back(completion["choices"][0]["message"])
            client.messages += (await client.step(message=client.messages[-1]))["messages"]
        if change == "arguments":
            await client.play_on()

    text_said = f"<think>\nhm\n</think>\n\n  a thought \n{CALL % 12}"
    env = Dial() if change == "arguments" else Chat()
    trajectory = play(renderer, scripted(raw, text_said.removesuffix(END)), env, agent)
    assert len(trajectory.rows) == 1 and trajectory.status.trainable


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"messages": [{"role": "tool", "tool_call_id": "call_9", "content": "done"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"content": "hello"}]}, "messages[0].role"),
        ({"stop": ["x", ""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "dial"}}}, "tool_choice"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{}]}, "tools[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"functions": [{"name": "dial"}]}, "functions"),
    ],
)
def test_unsupported_fields_get_an_openai_error_and_the_episode_continues(
    renderer: Renderer, raw: Raw, fields: JsonObject, param: str
) -> None:
    async def agent(client: Agent) -> None:
        with pytest.raises(HttpRefusal, check=refusal(400, None)) as caught:
            await client.ask(**fields)
        error = json.loads(str(caught.value).partition(": ")[2])["error"]
        assert error["param"] == param and error["type"] == "invalid_request_error" and error["message"]
        await client.play_on()

    assert play(renderer, dialling(raw), Dial(), agent).status.trainable


def test_an_agents_stop_string_ends_the_reply_and_is_not_shown(renderer: Renderer, raw: Raw, tmp_path: Path) -> None:
    reply = "Thought: look.\nAction: look\nObservation: I make this up."

    async def agent(client: Agent) -> None:
        for stop in ("\nObservation:", ["Observation:", "never"], None):
            choice = (await client.chat(stop=stop))["choices"][0]
            text = choice["message"]["content"]
            assert text.rstrip() == (reply if stop is None else "Thought: look.\nAction: look")
            assert choice["finish_reason"] == "stop"
            client.messages += (await client.step(message=client.messages[-1]))["messages"]

    trajectory = play(renderer, scripted(raw, reply), Chat(), agent)
    assert [turn.stop for turn in trajectory.turns] == ["\nObservation:", "Observation:", ""]
    assert trajectory.turns[0].message.content.endswith("\nObservation:")
    assert len(trajectory.rows) == 1, "what comes back without the string continues the row"
    lines(tmp_path, [trajectory])
    assert verify_run(tmp_path, renderer).ok


def test_requests_that_make_no_sense_change_nothing(renderer: Renderer, raw: Raw) -> None:
    async def agent(client: Agent) -> None:
        with pytest.raises(HttpRefusal, check=refusal(400, "no_reply")):
            await client.step()
        with pytest.raises(HttpRefusal, check=refusal(400, "context_length_exceeded")):
            await client.ask(messages=[{"role": "user", "content": "x" * 5000}])
        await client.chat()
        with pytest.raises(HttpRefusal, check=refusal(400, "not_the_reply")):
            await client.step(message={"role": "assistant", "content": "open sesame"})
        for path, status in (("/episodes/nobody/step", 404), ("/v1/chat/completions", 401), ("/nowhere", 404)):
            with pytest.raises(HttpRefusal, check=refusal(status, None)):
                await client.http.post(path, client.request())
        client.messages += (await client.step())["messages"]
        await client.play_on()

    trajectory = play(renderer, dialling(raw, context_window=4096), Dial(), agent)
    assert trajectory.status.trainable and len(trajectory.rows) == 1


BROKEN = "<tool_call>\n{broken\n</tool_call>"
UNKNOWN = '<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("reply", [BROKEN, UNKNOWN, "hm " + BROKEN + CALL % 12, CALL % 12 + UNKNOWN])
def test_a_call_that_cannot_run_is_sent_as_text_and_answered_as_a_user_message(
    renderer: Renderer, raw: Raw, tmp_path: Path, reply: str
) -> None:
    reply = reply.replace(END, "")
    own = asyncio.run(RolloutLoop(scripted(raw, reply), renderer).run(Dial(), Episode(Task("Env-v0", 7))))

    async def agent(client: Agent) -> None:
        while True:
            choice = (await client.chat())["choices"][0]
            names = [call["function"]["name"] for call in choice["message"].get("tool_calls", ())]
            assert names == ["dial"] * ("dial" in reply)
            assert choice["finish_reason"] == ("tool_calls" if names else "stop")
            assert ("broken" in reply) == ("{broken" in choice["message"]["content"])
            answer = await client.step(message=choice["message"])
            if answer["terminated"] or answer["truncated"]:
                return
            assert [message["role"] for message in answer["messages"]] == ["tool"] * len(names) + ["user"]
            client.messages += answer["messages"]

    outside = play(renderer, scripted(raw, reply), Dial(), agent)
    assert len(outside.rows) == 1
    assert lines(tmp_path / "other", [outside]) == lines(tmp_path / "one", [own])


@pytest.mark.parametrize("reply", [BROKEN, "hm " + BROKEN + CALL % 12])
def test_an_agent_that_answers_such_a_reply_itself_leaves_a_sound_record(
    renderer: Renderer, raw: Raw, tmp_path: Path, reply: str
) -> None:
    async def agent(client: Agent) -> None:
        for _ in range(2):
            calls = (await client.chat())["choices"][0]["message"].get("tool_calls", ())
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
            client.messages += results or [{"role": "user", "content": "Say that again."}]
        await client.play_on()

    trajectory = play(renderer, scripted(raw, reply.replace(END, "")), Dial(), agent)
    sampled = [span.ids for row in trajectory.rows for span in row.spans if span.source is Source.POLICY]
    assert len(sampled) == len(trajectory.turns) == 8 and trajectory.status.trainable
    lines(tmp_path / "run", [trajectory])
    assert verify_run(tmp_path / "run", renderer).ok


def test_tool_choice_none_shows_calls_as_text_in_the_same_row(renderer: Renderer, raw: Raw) -> None:
    async def agent(client: Agent) -> None:
        message = (await client.chat(tool_choice="none"))["choices"][0]["message"]
        assert "tool_calls" not in message and "dial" in message["content"]
        client.messages.append({"role": "user", "content": "Now do it."})
        assert (await client.chat())["choices"][0]["message"]["tool_calls"]
        client.messages += (await client.step())["messages"]
        await client.play_on()

    trajectory = play(renderer, scripted(raw, (CALL % 12).removesuffix(END)), Dial(), agent)
    assert len(trajectory.rows) == 1 and trajectory.status.trainable


def test_fields_that_are_unknown_are_ignored_with_one_warning(
    renderer: Renderer, raw: Raw, warnings_of: Callable[[], list[str]]
) -> None:
    async def agent(client: Agent) -> None:
        for _ in range(3):
            await client.chat(verbosity="low", prediction={"type": "content"})
            client.messages += (await client.step())["messages"]

    assert play(renderer, scripted(raw, "hm"), Chat(), agent).status is Status.COMPLETED
    assert len([line for line in warnings_of() if "ignored" in line]) == 2


def test_a_full_window_is_a_bad_request_and_shorter_messages_continue(renderer: Renderer, raw: Raw) -> None:
    async def agent(client: Agent) -> None:
        await client.chat()
        opening = list(client.messages[:-1])
        client.messages.append({"role": "user", "content": "x" * 5000})
        with pytest.raises(HttpRefusal, match="maximum context length is 4096", check=refusal(400, CONTEXT_EXCEEDED)):
            await client.chat()
        client.messages = opening
        await client.play_on()

    trajectory = play(renderer, scripted(raw, "hm", "ha"), Chat(), agent, Limits(context_window=4096))
    assert trajectory.status is Status.COMPLETED


@pytest.mark.parametrize("num_steps", [0, 1])
def test_giving_up_at_a_full_window_has_a_reward_if_there_was_an_action(
    renderer: Renderer, raw: Raw, num_steps: int
) -> None:
    async def run() -> Trajectory:
        loop = ServedLoop(RolloutLoop(scripted(raw, "hm"), renderer, Limits(context_window=4096)), idle_s=0.2)
        async with EpisodeServer(loop, QUIET) as server, Agent(server.url) as client:
            playing = asyncio.ensure_future(loop.run(Chat(), Episode(Task("Env-v0", 7))))
            await client.claim()
            await client.chat()
            for _ in range(num_steps):
                client.messages += (await client.step())["messages"]
            client.messages.append({"role": "user", "content": "x" * 5000})
            with pytest.raises(HttpRefusal, check=refusal(400, CONTEXT_EXCEEDED)):
                await client.chat()
            return await playing

    trajectory = asyncio.run(run())
    assert trajectory.status is (Status.TRUNCATED if num_steps else Status.UNPLAYED)
    assert trajectory.stop_reason is StopReason.CONTEXT and trajectory.reward == (0.5 if num_steps else None)


def test_episodes_cannot_be_guessed_and_their_address_is_not_the_callers(renderer: Renderer, raw: Raw) -> None:
    async def run() -> None:
        loop = ServedLoop(RolloutLoop(scripted(raw, "hm"), renderer))
        async with EpisodeServer(loop, QUIET) as server:
            client = HttpClient(server.url, headers={"Host": "localhost:1"})
            openings = []
            for seed in (1, 1):
                playing = asyncio.ensure_future(loop.run(Chat(), Episode(Task("Env-v0", seed))))
                openings.append(await client.post("/episodes", {}))
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
            await client.close()
            first, second = (opening["episode"] for opening in openings)
            assert first != second and min(len(first), len(second)) > 22
            assert [opening["base_url"].startswith(f"{server.url}/episodes/") for opening in openings] == [True] * 2

    asyncio.run(run())


# ---- what ends an episode


def test_the_agents_own_bound_cuts_a_reply_and_ends_nothing(renderer: Renderer, raw: Raw) -> None:
    async def agent(client: Agent) -> None:
        for bound in ("max_tokens", "max_completion_tokens", "max_tokens"):
            choice = (await client.chat(**{bound: 3}))["choices"][0]
            assert choice["finish_reason"] == "length" and choice["message"]["content"] == "a l"
            client.messages += (await client.step())["messages"]

    trajectory = play(renderer, scripted(raw, "a long reply"), Chat(), agent)
    assert (trajectory.status, len(trajectory.rows)) == (Status.COMPLETED, 1)


class Torn(Chat):
    """Fails at its second step."""

    def step(self, action: str) -> StepResult:
        if self.turns == 2:
            raise ValueError("the wire is cut")
        return super().step(action)


def test_an_environment_failure_is_reported_to_the_agent_and_recorded(renderer: Renderer, raw: Raw) -> None:
    async def agent(client: Agent) -> None:
        with pytest.raises(HttpRefusal, match="the wire is cut", check=refusal(410, "env_error")):
            await client.play_on()

    trajectory = play(renderer, scripted(raw, "hm"), Torn(), agent)
    assert trajectory.status is Status.ENV_ERROR and len(trajectory.turns) == 2


def test_an_engine_failure_is_reported_to_the_agent(renderer: Renderer) -> None:
    async def agent(client: Agent) -> None:
        with pytest.raises(HttpRefusal, match="asked for a failure", check=refusal(410, "engine_error")):
            await client.ask()

    engine = ScriptedEngine(lambda *_: ScriptedReply(fault="raise"))
    assert play(renderer, engine, Chat(), agent).status is Status.ENGINE_ERROR


# ---- the door


def test_claims_wait_for_an_episode_and_end_with_the_run(renderer: Renderer, raw: Raw) -> None:
    async def run() -> None:
        loop = ServedLoop(RolloutLoop(scripted(raw, "hm"), renderer))
        async with (
            EpisodeServer(loop, ServeConfig(port=0, claim_s=0.05, quiet_s=0.0)) as server,
            Agent(server.url) as client,
        ):
            assert await client.http.post("/episodes", {}) is None
            health = await client.http.get("/health")
            assert health == {"status": "ok", "waiting": 0, "playing": 0, "over": False}
            assert [model["id"] for model in (await client.http.get("/v1/models"))["data"]] == ["policy"]
            claim = asyncio.ensure_future(client.claim())
            playing = asyncio.ensure_future(loop.run(Chat(), Episode(Task("Env-v0", 1))))
            assert await claim
            await client.play_on()
            assert (await playing).status is Status.COMPLETED
            loop.end()
            with pytest.raises(HttpRefusal, check=refusal(410, "run_over")):
                await client.claim()

    asyncio.run(run())


def test_a_claim_whose_agent_has_gone_takes_no_episode(renderer: Renderer, raw: Raw) -> None:
    async def run() -> None:
        async with served(RolloutLoop(scripted(raw, "hm"), renderer)) as (loop, url):
            async with Agent(url) as gone:
                claim = asyncio.ensure_future(gone.claim())
                await asyncio.sleep(0.05)
                claim.cancel()
            await asyncio.sleep(0.05)
            playing = asyncio.ensure_future(loop.run(Chat(), Episode(Task("Env-v0", 1))))
            async with Agent(url) as client:
                await client.claim()
                await client.play_on()
            assert (await playing).status is Status.COMPLETED

    asyncio.run(run())


@pytest.mark.parametrize("header", ["Authorization", "X-Episode", "x-api-key"])
def test_the_plain_address_takes_the_episode_from_the_api_key_or_a_header(
    renderer: Renderer, raw: Raw, header: str
) -> None:
    async def agent(player: Agent) -> None:
        name = player.opening["episode"]
        client = HttpClient(player.url, headers={header: f"Bearer {name}" if header == "Authorization" else name})
        completion = await client.post("/v1/chat/completions", player.request())
        player.messages.append(completion["choices"][0]["message"])
        await client.close()
        player.messages += (await player.step())["messages"]
        await player.play_on()

    assert play(renderer, scripted(raw, "hm"), Chat(), agent).status is Status.COMPLETED


async def chunks_of(client: Agent, **fields: object) -> list[JsonObject]:
    url = f"{client.opening['base_url']}/chat/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=client.request(stream=True, **fields)) as answer,
    ):
        assert answer.content_type == "text/event-stream"
        events = (await answer.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_a_streamed_reply_is_the_same_reply_in_parts(renderer: Renderer, raw: Raw) -> None:
    reply_text = f"<think>\nhm\n</think>\n\nI dial.\n{CALL % 1}".removesuffix(END) + CALL % 2

    async def agent(client: Agent) -> None:
        chunks = await chunks_of(client, stream_options={"include_usage": True})
        http = HttpClient(client.url, headers={"X-Stainless-Retry-Count": "1"})
        whole = await http.post(f"/episodes/{client.opening['episode']}/v1/chat/completions", client.request())
        await http.close()
        message = whole["choices"][0]["message"]
        client.messages.append(message)
        assert {chunk["id"] for chunk in chunks} == {whole["id"]}
        assert chunks[-1]["usage"] == whole["usage"] and not chunks[-1]["choices"]
        assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls" == whole["choices"][0]["finish_reason"]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-2]]
        assert "".join(delta.get("content") or "" for delta in deltas) == message["content"] == "I dial."
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
        calls: dict[int, JsonObject] = {}
        for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
            whole_call = calls.setdefault(part["index"], {**part, "function": {"arguments": "", **part["function"]}})
            if whole_call["function"] is not part["function"] and "name" not in part["function"]:
                whole_call["function"]["arguments"] += part["function"]["arguments"]
        assert [{**call, "function": call["function"]} for call in calls.values()] == [
            {"index": index, **call} for index, call in enumerate(message["tool_calls"])
        ]
        client.messages += (await client.step())["messages"]
        await client.play_on()

    trajectory = play(renderer, scripted(raw, reply_text.removesuffix(END)), Dial(), agent)
    assert trajectory.turns[0].message.content == "I dial." and len(trajectory.rows) == 1


def test_the_official_client_streams_and_reads_errors(renderer: Renderer, raw: Raw) -> None:
    from openai import (  # here, and not above: collected by every process, and costly
        APIStatusError,
        AsyncOpenAI,
        BadRequestError,
    )

    async def agent(player: Agent) -> None:
        async with AsyncOpenAI(base_url=player.opening["base_url"], api_key="none") as client:
            options = {"model": "policy", "messages": player.messages, "tools": player.opening["tools"]}
            with pytest.raises(BadRequestError) as caught:
                await client.chat.completions.create(**options, logit_bias={"5": 1})
            assert caught.value.param == "logit_bias" and caught.value.code == "unsupported_value"
            async with client.chat.completions.stream(**options) as stream:
                whole = await stream.get_final_completion()
            message = whole.choices[0].message.model_dump(exclude_none=True)
            call = message["tool_calls"][0]["function"]
            assert (call["name"], json.loads(call["arguments"])) == ("dial", {"digit": 1})
            assert whole.choices[0].finish_reason == "tool_calls"
            player.messages.append(message)
            player.messages += (await player.step(message=message))["messages"]
            await player.play_on()
            with pytest.raises(APIStatusError, match="is over") as over:
                await client.chat.completions.create(**{**options, "messages": player.messages})
            assert over.value.status_code == 410

    engine = ScriptedEngine(lambda *_: raw(CALL % 1))
    trajectory = play(renderer, engine, Dial(), agent)
    assert trajectory.status.trainable and len(trajectory.rows) == 1


def test_call_ids_are_unique_in_a_conversation(renderer: Renderer, raw: Raw) -> None:
    async def agent(client: Agent) -> None:
        await client.play_on()
        ids = [call["id"] for message in client.messages for call in message.get("tool_calls", ())]
        answered = [message["tool_call_id"] for message in client.messages if message["role"] == "tool"]
        assert len(set(ids)) == len(ids) == 6 and ids == answered

    engine = ScriptedEngine(lambda *_: raw(CALL % 12))
    trajectory = play(renderer, engine, Dial(), agent)
    assert {call.id for turn in trajectory.turns for call in turn.message.tool_calls} == {"call_0"}


def test_the_runs_distribution_wins_over_the_agents_with_a_warning_for_each_field(
    renderer: Renderer, raw: Raw, warnings_of: Callable[[], list[str]]
) -> None:
    async def agent(client: Agent) -> None:
        for _ in range(3):
            await client.chat(temperature=0.1, seed=4)
            client.messages += (await client.step())["messages"]

    play(renderer, scripted(raw, "hm"), Chat(), agent)
    warnings = [line for line in warnings_of() if "plays no role" in line]
    assert len(warnings) == 2 and "temperature" in "".join(warnings)


def test_a_port_that_is_taken_is_named(renderer: Renderer, raw: Raw) -> None:
    async def run() -> None:
        loop = RolloutLoop(scripted(raw, "hm"), renderer)
        async with served(loop) as (_, url):
            port = int(url.rpartition(":")[2])
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
                async with EpisodeServer(ServedLoop(loop), ServeConfig(port=port)):
                    pass

    asyncio.run(run())
