"""Episodes that are led from outside: whatever an agent does, what was sampled is recorded once, and verifies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import ConfigError
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.history import History
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.rollout.sampling.sampler import Sampler
from agentgym.rollout.serving.agent_session import AgentSession, EpisodeEnded, StepAnswer, StepRequest
from agentgym.rollout.serving.served_loop import ServedLoop
from agentgym.rollout.serving.wires.wire import AgentReply, AgentRequest, RequestRefused
from agentgym.tools import tool
from agentgym.trajectory import RowOrigin, Source, Status, StopReason, Trajectory
from agentgym.types import Message, Task, ToolSpec

Raw = Callable[[str], list[int]]
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "%s", "arguments": {"digit": %s}}\n</tool_call>'
EPISODE = Episode(Task("Env-v0", 7))
CLOCK = ToolSpec("clock", "Tells the time.", {"type": "object", "properties": {}})


class Chat(TextEnv):
    """Answers with the number of the turn; ends after three."""

    runs_inline = True
    system_prompt = "Count."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        if seed == 0:
            raise ValueError("no such world")
        return f"seed {seed}", {}

    def step(self, action: str) -> StepResult:
        return f"turn {self.turns}", 0.5, self.turns == 3, False, {}


class Dial(ToolEnv):
    """One tool."""

    runs_inline = True
    max_turns = 4

    def start(self, options: dict[str, Any]) -> str:
        return "Dial."

    @tool
    def dial(self, digit: int) -> str:
        """Dials a digit."""
        if digit == 9:
            self.end(success=True, reward=1.0)
        return f"dialled {digit}"


class Player:
    """An agent in this process: it passes on what it gets, unless a test makes it do otherwise."""

    def __init__(self, loop: ServedLoop) -> None:
        self.loop = loop
        self.messages: list[Message] = []
        self.tools: tuple[ToolSpec, ...] = ()

    async def claim(self) -> None:
        opening = await self.loop.claim(10.0)
        assert opening is not None
        self.messages, self.tools = list(opening.messages), opening.tools
        session = self.loop.session(opening.episode)
        assert session is not None
        self.session: AgentSession = session

    async def chat(self) -> AgentReply:
        reply = await self.session.chat(AgentRequest(tuple(self.messages), self.tools))
        self.messages.append(reply.message)
        return reply

    async def step(self) -> StepAnswer:
        answer = await self.session.step(StepRequest())
        self.messages += answer.messages
        return answer

    def hear(self, text: str) -> None:
        self.messages.append(Message("user", text))

    async def play_on(self) -> StepAnswer:
        while True:
            await self.chat()
            answer = await self.step()
            if answer.terminated or answer.truncated:
                return answer


Agent = Callable[[Player], Awaitable[None]]


def scripted(raw: Raw, *texts: str) -> ScriptedEngine:
    """Says these one after the other, each with the end mark; the last one for ever."""
    replies = iter(texts)
    return ScriptedEngine(lambda *_: raw(next(replies, texts[-1]) + END))


def play(loop: RolloutLoop, env: TextEnv, agent: Agent, idle_s: float = 30.0) -> Trajectory:
    """One episode that `agent` plays."""

    async def run() -> Trajectory:
        served = ServedLoop(loop, idle_s=idle_s)
        playing = asyncio.ensure_future(served.run(env, EPISODE))
        player = Player(served)
        await player.claim()
        await agent(player)
        return await playing

    trajectory = asyncio.run(run())
    assert isinstance(loop.engine, ScriptedEngine) and not loop.engine.sessions, "the session was not released"
    return trajectory


async def relay(player: Player) -> None:
    await player.play_on()


def lines(folder: Path, *trajectories: Trajectory) -> bytes:
    folder.mkdir(exist_ok=True)
    (folder / "episodes.jsonl").unlink(missing_ok=True)
    with EpisodeWriter(folder) as writer:
        writer.write(trajectories)
    return (folder / "episodes.jsonl").read_bytes()


def assert_sound(trajectory: Trajectory, folder: Path, renderer: Renderer) -> None:
    lines(folder, trajectory)
    report = verify_run(folder, renderer)
    assert report.ok, report.lines()


def policy_ids(trajectory: Trajectory) -> list[list[int]]:
    """The ids of all replies, in the order in which they were sampled."""
    replies = [list(span.ids) for row in trajectory.rows for span in row.spans if span.source is Source.POLICY]
    return [replies[turn] for turn in trajectory.by_time]


# ---- whatever an agent does

ACTS = ("chat", "chat", "step", "step", "note", "answer", "answer one", "forget", "tools", "prompt", "strip")
MARKERS = ("A note.", "So far: nothing.", "Be a pirate.", "done", "dial(", "clock(")


@pytest.mark.long
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(acts=["chat", "note", "note", "chat"], first=0, history="append")
@example(acts=["chat", "answer one", "chat"], first=3, history="append")
@example(acts=["chat", "step", "tools", "chat"], first=1, history="append")
@given(
    acts=st.lists(st.sampled_from(ACTS), max_size=14),
    first=st.integers(0, 5),
    history=st.sampled_from(["append", "rerender"]),
)
def test_each_sampled_id_is_recorded_once_for_any_behaviour_of_an_agent(
    renderer: Renderer, raw: Raw, tmp_path: Path, acts: list[str], first: int, history: History
) -> None:
    texts = [
        "hm",
        CALL % ("dial", 3),
        "",
        CALL % ("clock", 1) + CALL % ("dial", 4),
        "<tool_call>{",
        "<think>so</think>",
    ]
    emitted: list[list[int]] = []
    prompts: list[str] = []

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        prompts.append(renderer.decode(prompt_ids))
        emitted.append(raw(texts[(first + len(emitted)) % len(texts)] + END))
        return emitted[-1]

    async def agent(player: Player) -> None:
        for act in acts:
            prompt_sent, num_prompts = renderer.decode(renderer.render(player.messages, player.tools)), len(prompts)
            try:
                await _do(player, act)
            except RequestRefused:
                continue
            except EpisodeEnded:
                return
            for prompt in prompts[num_prompts:]:  # the policy was shown what the agent sent
                assert [prompt.count(text) for text in MARKERS] == [prompt_sent.count(text) for text in MARKERS]

    loop = RolloutLoop(ScriptedEngine(reply), renderer, Limits(max_turns=6), history=history)
    trajectory = play(loop, Dial(), agent, idle_s=0.005)
    assert policy_ids(trajectory) == emitted
    assert_sound(trajectory, tmp_path, renderer)


async def _do(player: Player, act: str) -> None:
    last = player.messages[-1]
    if act in ("chat", "step"):
        await (player.chat() if act == "chat" else player.step())
    elif act == "note":
        player.hear("A note.")
    elif act in ("answer", "answer one"):
        calls = last.tool_calls[: 1 if act == "answer one" else None]
        player.messages += [Message("tool", "done", tool_call_id=call.id) for call in calls]
    elif act == "forget":
        player.messages = [*player.messages[:1], Message("user", "So far: nothing.")]
    elif act == "tools":
        player.tools = () if player.tools else (CLOCK,)
    elif act == "prompt":
        player.messages = [Message("system", "Be a pirate."), *player.messages]
    elif last.role == "assistant":
        player.messages[-1] = Message("assistant", last.content.strip(), None, last.tool_calls)


def test_a_rewritten_history_begins_a_row_and_is_trained_once(renderer: Renderer, raw: Raw, tmp_path: Path) -> None:
    async def agent(player: Player) -> None:
        for _ in range(3):
            await player.chat()
            await player.step()
            player.messages = [player.messages[0], Message("user", "So far: nothing.")]  # the same words each time

    trajectory = play(RolloutLoop(scripted(raw, "one", "two", "three"), renderer), Chat(), agent)
    assert trajectory.status is Status.COMPLETED and trajectory.reward == 1.5
    assert policy_ids(trajectory) == [raw(text + END) for text in ("one", "two", "three")]
    assert [row.num_trained_tokens > 0 for row in trajectory.rows] == [True, True, True]
    second = renderer.decode(trajectory.rows[1].ids.tolist())
    assert "So far: nothing." in second and "seed 7" not in second
    assert_sound(trajectory, tmp_path, renderer)


def test_an_agent_with_a_prompt_and_tools_of_its_own_is_recorded_as_it_asks(
    renderer: Renderer, raw: Raw, tmp_path: Path
) -> None:
    async def agent(player: Player) -> None:
        player.messages[0], player.tools = Message("system", "You are a pirate."), (CLOCK,)
        (call,) = (await player.chat()).message.tool_calls
        player.messages.append(Message("tool", "noon", tool_call_id=call.id))
        await player.chat()
        player.hear("Now count.")
        await player.play_on()

    texts = (CALL % ("clock", 1), "It is noon.", "one", "two", "three")
    trajectory = play(RolloutLoop(scripted(raw, *texts), renderer), Chat(), agent)
    assert policy_ids(trajectory) == [raw(text + END) for text in texts]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 0.5, 0.5, 0.5]
    (row,) = trajectory.rows
    assert row.origin == RowOrigin("main") and "pirate" in renderer.decode(row.ids.tolist())
    assert [result.content for result in trajectory.turns[0].tool_results] == ["noon"]
    assert trajectory.turns[1].observation == "Now count."
    assert_sound(trajectory, tmp_path, renderer)


def test_an_agent_that_goes_on_by_itself_for_ever_meets_the_turn_limit(renderer: Renderer, raw: Raw) -> None:
    async def agent(player: Player) -> None:
        with pytest.raises(EpisodeEnded, match="max_turns"):
            while True:
                await player.chat()
                player.hear("Go on.")

    trajectory = play(RolloutLoop(scripted(raw, "hm"), renderer, Limits(max_turns=4)), Chat(), agent)
    assert (trajectory.stop_reason, len(trajectory.turns), len(trajectory.rows)) == (StopReason.MAX_TURNS, 4, 1)


# ---- what ends an episode


@pytest.mark.long
@pytest.mark.parametrize("num_requests", [0, 1, 2])
def test_an_agent_that_vanishes_ends_its_episode_as_a_time_out(renderer: Renderer, raw: Raw, num_requests: int) -> None:
    async def agent(player: Player) -> None:
        for request in (player.chat, player.step)[:num_requests]:
            await request()

    trajectory = play(RolloutLoop(scripted(raw, "hm"), renderer), Chat(), agent, idle_s=0.5)
    assert (trajectory.status, trajectory.stop_reason) == (Status.TIMEOUT, StopReason.DEADLINE)
    assert "idle_s" in str(trajectory.error) and trajectory.reward is None
    assert len(trajectory.turns) == min(num_requests, 1)


def test_the_deadline_does_not_run_while_an_episode_waits_for_an_agent(renderer: Renderer, raw: Raw) -> None:
    async def run() -> Trajectory:
        served = ServedLoop(RolloutLoop(scripted(raw, "hm"), renderer, Limits(deadline_s=0.5)))
        playing = asyncio.ensure_future(served.run(Chat(), EPISODE))
        await asyncio.sleep(0.6)
        player = Player(served)
        await player.claim()
        await player.play_on()
        return await playing

    assert asyncio.run(run()).status is Status.COMPLETED


def test_a_reply_that_meets_its_budget_truncates_as_in_the_loop(renderer: Renderer, raw: Raw, tmp_path: Path) -> None:
    def loop() -> RolloutLoop:
        return RolloutLoop(scripted(raw, "abc", "a long reply"), renderer, Limits(turn_tokens=5))

    async def agent(player: Player) -> None:
        assert (await player.play_on()).truncated
        player.hear("Again?")
        with pytest.raises(EpisodeEnded, match="turn_tokens"):
            await player.chat()

    outside = play(loop(), Chat(), agent)
    assert outside.stop_reason is StopReason.TURN_TOKENS
    own = asyncio.run(loop().run(Chat(), EPISODE))
    assert lines(tmp_path / "other", outside) == lines(tmp_path / "one", own)


@pytest.mark.parametrize("reason", [StopReason.CONTEXT, StopReason.TRAJECTORY_TOKENS])
def test_an_answer_without_room_for_a_reply_truncates_as_in_the_loop(
    renderer: Renderer, raw: Raw, tmp_path: Path, reason: StopReason
) -> None:
    def loop(limits: Limits) -> RolloutLoop:
        return RolloutLoop(scripted(raw, "hm"), renderer, limits)

    spans = asyncio.run(loop(Limits()).run(Chat(), EPISODE)).rows[0].spans
    room = sum(len(span.ids) for span in spans[:-1])
    limits = Limits(context_window=room) if reason is StopReason.CONTEXT else Limits(trajectory_tokens=room)
    outside = play(loop(limits), Chat(), relay)
    assert (outside.stop_reason, len(outside.turns)) == (reason, 2)
    own = asyncio.run(loop(limits).run(Chat(), EPISODE))
    assert lines(tmp_path / "other", outside) == lines(tmp_path / "one", own)


def test_rerendered_history_is_followed_as_in_the_loop(renderer: Renderer, raw: Raw, tmp_path: Path) -> None:
    def loop() -> RolloutLoop:
        texts = (f"<think>\nhm\n</think>\n\n {CALL % ('dial', 3)}", "word", CALL % ("dial", 9))
        return RolloutLoop(scripted(raw, *texts), renderer, history="rerender")

    outside, own = play(loop(), Dial(), relay), asyncio.run(loop().run(Dial(), EPISODE))
    assert lines(tmp_path / "other", outside) == lines(tmp_path / "one", own)


def test_an_episode_that_cannot_begin_costs_its_agent_nothing(renderer: Renderer, raw: Raw) -> None:
    async def run() -> list[Trajectory]:
        served = ServedLoop(RolloutLoop(scripted(raw, "hm"), renderer))
        episodes = [Episode(Task("Env-v0", seed), f"0/{seed}") for seed in range(3)]
        playing = asyncio.ensure_future(Sampler(served, lambda task: Chat()).run(episodes))
        player = Player(served)
        for _ in range(2):
            await player.claim()
            await player.play_on()
        return await playing

    statuses = [trajectory.status for trajectory in asyncio.run(run())]
    assert statuses == [Status.ENV_ERROR, Status.COMPLETED, Status.COMPLETED]


def test_surplus_episodes_are_cancelled_whether_they_wait_or_play(renderer: Renderer, raw: Raw) -> None:
    async def run() -> None:
        served = ServedLoop(RolloutLoop(scripted(raw, "hm"), renderer))
        tasks = [Task("Env-v0", seed) for seed in range(1, 7)]
        playing = asyncio.ensure_future(Sampler(served, lambda task: Chat()).sample(tasks, 1, num_groups=2))
        idle, player = Player(served), Player(served)
        await idle.claim()
        for _ in range(2):
            await player.claim()
            await player.play_on()
        assert len(await playing) == 2
        with pytest.raises(EpisodeEnded, match="cancelled"):
            await idle.chat()
        assert (served.num_waiting, served.num_playing) == (0, 0)

    asyncio.run(run())


def test_a_claim_that_is_given_up_leaves_its_episode_to_the_next(renderer: Renderer, raw: Raw) -> None:
    async def run() -> Trajectory:
        served = ServedLoop(RolloutLoop(scripted(raw, "hm"), renderer))
        gone = asyncio.ensure_future(served.claim(30.0))
        await asyncio.sleep(0)
        playing = asyncio.ensure_future(served.run(Chat(), EPISODE))
        await asyncio.sleep(0)
        gone.cancel()
        player = Player(served)
        await player.claim()
        await player.play_on()
        return await playing

    assert asyncio.run(run()).status is Status.COMPLETED


def test_waiting_agents_learn_that_the_run_is_over(renderer: Renderer, raw: Raw) -> None:
    async def run() -> None:
        served = ServedLoop(RolloutLoop(scripted(raw, "hm"), renderer))
        assert await served.claim(0.01) is None
        waiting = asyncio.ensure_future(served.claim(30.0))
        await asyncio.sleep(0)
        served.end()
        for claim in (waiting, served.claim(30.0)):
            with pytest.raises(EpisodeEnded, match="the run is over"):
                await claim

    asyncio.run(run())


def test_an_idle_time_of_nothing_is_refused(renderer: Renderer, raw: Raw) -> None:
    with pytest.raises(ConfigError, match="idle_s"):
        ServedLoop(RolloutLoop(scripted(raw, "hm"), renderer), idle_s=0)
