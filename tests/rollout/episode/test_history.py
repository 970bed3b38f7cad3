"""Histories told otherwise, by template, environment or model: each sampled id is trained once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.action import Action
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import ConfigError, RenderError
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.rollout.episode.history import ASK, CompactionConfig
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.episodes_file import EpisodeWriter, read_episodes
from agentgym.rollout.sampling.sampler import Sampler, SamplerConfig
from agentgym.rollout.serving.agent_session import StepAnswer, StepRequest
from agentgym.rollout.serving.served_loop import ServedLoop
from agentgym.rollout.serving.wires.wire import AgentRequest
from agentgym.tools import tool
from agentgym.trajectory import Group, Source, Status, StopReason, Trajectory
from agentgym.types import Message, Task

batches = pytest.importorskip("agentgym.trainers.batch.batch", reason="needs torch")
credits = pytest.importorskip("agentgym.trainers.batch.credits")

Raw = Callable[[str], list[int]]
END = "<|im_end|>"
NEVER = CompactionConfig()


class Diary(TextEnv):
    """Answers with the turn's number; tells the history anew at the turns in `rewrites`."""

    runs_inline = True
    system_prompt = "Write."

    def __init__(self, num_turns: int = 4, rewrites: Sequence[int] = (), answer: str = "page {}") -> None:
        super().__init__()
        self.num_turns, self.rewrites, self.answer = num_turns, rewrites, answer

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return "page 0", {}

    def step(self, action: str) -> StepResult:
        info: Info = {}
        if self.turns in self.rewrites:
            info["history"] = (Message("user", f"You are at page {self.turns}; you wrote: {action}"),)
        return self.answer.format(self.turns), 1.0, self.turns == self.num_turns, False, info


class Dial(ToolEnv):
    """One tool that ends the episode at its fourth call."""

    runs_inline = True

    def start(self, options: dict[str, Any]) -> str:
        return "Dial."

    @tool
    def dial(self, digit: int) -> str:
        """Dials a digit."""
        if self.turns == 4:
            self.end(success=True, reward=1.0)
        return f"dialled {digit}"


@dataclass
class Played:
    """An episode, and what its engine was asked and said."""

    trajectory: Trajectory
    sampled: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Prompt and reply, one after the other."""

    @property
    def group(self) -> Group:
        trajectory = self.trajectory
        return Group(trajectory.group, trajectory.task, (trajectory,))


def play(
    renderer: Renderer,
    env: TextEnv,
    reply: Callable[[str], Sequence[int]],
    limits: Limits | None = None,
    **settings: Any,
) -> Played:
    """`reply` gives the ids for the text of a prompt."""
    sampled: list[tuple[list[int], list[int]]] = []

    def say(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        ids = list(reply(renderer.decode(prompt_ids)))[: sampling.max_tokens]
        sampled.append((list(prompt_ids), ids))
        return ids

    window = settings.pop("window", 1 << 20)
    loop = RolloutLoop(ScriptedEngine(say, context_window=window), renderer, limits, **settings)
    sampler = Sampler(loop, lambda task: env, SamplerConfig(max_failure_rate=1.0))
    (group,) = asyncio.run(sampler.sample([Task("Env-v0", 7)], 1))
    return Played(group.trajectories[0], sampled)


def trained(played: Played) -> Counter[tuple[tuple[int, ...], int]]:
    """Each trained target with all that stands before it in its row, as the batch has them."""
    (credit,) = credits.credit_groups([played.group], "grpo", allow_single=True)
    batch = batches.build_batch([played.group], [credit], aggregation="token-mean")
    counts: Counter[tuple[tuple[int, ...], int]] = Counter()
    start = 0
    for length in batch.seqlens:
        ids, mask = batch.ids_N[start : start + length].tolist(), batch.mask_N[start : start + length].tolist()
        targets = batch.target_N[start : start + length].tolist()
        counts.update((tuple(ids[: n + 1]), targets[n]) for n in range(length) if mask[n])
        start += length
    return counts


def said_by_engine(sampled: Sequence[tuple[list[int], list[int]]]) -> Counter[tuple[tuple[int, ...], int]]:
    """Each sampled id with all that the engine had before it."""
    pairs = [((*prompt, *reply[:n]), index) for prompt, reply in sampled for n, index in enumerate(reply)]
    return Counter(pairs)


def check_record(folder: Path, renderer: Renderer, played: Played) -> None:
    """The episode reads back as it was written, and every property of it holds."""
    with EpisodeWriter(folder) as writer:
        writer.write([played.trajectory])
    (record,) = read_episodes(folder)
    assert record.trajectory == played.trajectory
    report = verify_run(folder, renderer)
    assert report.ok, report.lines()
    checked = {verdict.about.name: verdict.num_checked for verdict in report.verdicts}
    assert checked["prompt"] == checked["tools"] == len(played.trajectory.rows)
    assert checked["reply"] == len(played.trajectory.turns)


def notes(raw: Raw) -> Callable[[str], list[int]]:
    """Replies of a model that writes notes where it is asked for them."""
    return lambda prompt: raw(
        ("my notes" if prompt.rstrip().endswith(f"{ASK}{END}\n<|im_start|>assistant") else "written") + END
    )


def test_the_environments_history_is_the_next_prompt_in_a_new_row(renderer: Renderer, raw: Raw, tmp_path: Path) -> None:
    played = play(renderer, Diary(rewrites=[2]), notes(raw))
    first, second = played.trajectory.rows
    assert [span.source for span in first.spans] == [Source.PROMPT, Source.POLICY, Source.ENV, Source.POLICY]
    messages = (Message("system", "Write."), Message("user", "You are at page 2; you wrote: written"))
    assert second.messages == messages
    assert list(second.spans[0].ids) == renderer.render(messages)
    assert len(played.trajectory.turns) == 4 and trained(played) == said_by_engine(played.sampled)
    check_record(tmp_path, renderer, played)


def test_a_tool_may_rewrite_the_history(renderer: Renderer, raw: Raw, tmp_path: Path) -> None:
    class Forgetful(Dial):
        @tool
        def forget(self) -> str:
            """Forgets everything."""
            self.retell([Message("user", f"You have dialled {self.turns - 1} times.")])
            return "forgotten"

    calls = iter(["dial", "forget", "dial", "dial"])
    arguments = {"dial": '{"digit": 3}', "forget": "{}"}

    def reply(prompt: str) -> list[int]:
        name = next(calls)
        return raw(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments[name]}}}\n</tool_call>{END}')

    played = play(renderer, Forgetful(), reply)
    assert played.trajectory.success and len(played.trajectory.rows) == 2
    assert played.trajectory.rows[1].messages == (Message("user", "You have dialled 1 times."),)
    assert trained(played) == said_by_engine(played.sampled)
    check_record(tmp_path, renderer, played)


def test_a_history_with_the_same_text_continues_the_row(renderer: Renderer, raw: Raw) -> None:
    class Same(Diary):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
            self.history_messages = [Message("user", "page 0")]
            return super().reset(seed=seed, options=options)

        def step(self, action: str) -> StepResult:
            assert isinstance(action, Action) and action.message is not None
            observation, *rest, _ = super().step(action)
            self.history_messages += [action.message, Message("user", observation)]
            return observation, *rest, {"history": tuple(self.history_messages)}  # type: ignore[return-value]

    assert len(play(renderer, Same(), notes(raw)).trajectory.rows) == 1


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ((), "at least one"),
        ("page 1", "tuple of Message"),
        ((Message("assistant", "I wrote."),), "not with its own message"),
    ],
)
def test_a_history_that_cannot_be_told_is_the_environments_error(
    renderer: Renderer, raw: Raw, history: object, message: str
) -> None:
    class Wrong(Diary):
        def step(self, action: str) -> StepResult:
            return "page", 0.0, False, False, {"history": history}

    trajectory = play(renderer, Wrong(), notes(raw)).trajectory
    assert trajectory.status is Status.ENV_ERROR and message in str(trajectory.error)


def test_a_conversation_that_fills_the_window_goes_on_after_a_summary(
    renderer: Renderer, raw: Raw, tmp_path: Path
) -> None:
    env, limits = Diary(num_turns=6, answer="page {} " + "x" * 200), Limits(max_turns=6, turn_tokens=64)
    without = play(renderer, env, notes(raw), limits, window=1000)
    assert (without.trajectory.status, without.trajectory.stop_reason) == (Status.TRUNCATED, StopReason.CONTEXT)
    played = play(renderer, env, notes(raw), limits, window=1000, compaction=CompactionConfig(at=0.7, tokens=40))
    trajectory = played.trajectory
    assert trajectory.status is Status.COMPLETED and trajectory.reward == 6.0
    requests = [turn.asked for turn in trajectory.turns]
    num_asked = requests.count(ASK)
    assert num_asked == trajectory.metrics["num_summaries"] == len(trajectory.rows) - 1 >= 1
    assert len(requests) - num_asked == 6, "a summary is no turn of the environment"
    row = trajectory.rows[1]
    assert row.messages is not None
    assert [message.role for message in row.messages] == ["system", "user", "assistant", "user"]
    assert row.messages[1].content.startswith("page 0\n\n") and row.messages[1].content.endswith("\nmy notes")
    assert row.messages[2].content == "written" and row.messages[3].content.startswith("page ")
    check_record(tmp_path, renderer, played)


def test_tool_results_follow_their_call_into_the_next_row(renderer: Renderer, raw: Raw, tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "dial", "arguments": {"digit": 3}}\n</tool_call>'

    def reply(prompt: str) -> list[int]:
        return raw(("notes" if ASK in prompt[-len(ASK) - 60 :] else call) + END)

    num_prompt = len(renderer.render([Message("user", "Dial.")], Dial().tool_specs))
    config = CompactionConfig(at=(num_prompt + 130) / (num_prompt + 1000), tokens=50)
    played = play(renderer, Dial(), reply, Limits(turn_tokens=256), window=num_prompt + 1000, compaction=config)
    trajectory = played.trajectory
    assert trajectory.success and trajectory.metrics["num_summaries"] >= 1
    assert trajectory.metrics["num_tool_calls"] == 4
    assert trajectory.rows[1].messages is not None
    *_, last_reply, result = trajectory.rows[1].messages
    assert last_reply.tool_calls[0].id == result.tool_call_id and result.content == "dialled 3"
    assert trajectory.rows[1].tools == Dial().tool_specs
    check_record(tmp_path, renderer, played)
    assert trained(played) == said_by_engine(played.sampled)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    replies=st.lists(st.lists(st.integers(0, 255), max_size=12), min_size=1, max_size=6),
    rewrites=st.sets(st.integers(1, 6)),
    history=st.sampled_from(["append", "rerender"]),
    at=st.sampled_from([None, 0.3, 0.5, 0.9]),
)
def test_each_sampled_id_is_trained_once_under_the_prefix_it_was_sampled_on(
    renderer: Renderer, replies: list[list[int]], rewrites: set[int], history: str, at: float | None
) -> None:
    (end,) = renderer.stop_ids
    replies_left = iter([[*ids, end] for ids in replies] * 3)
    env = Diary(num_turns=len(replies), rewrites=sorted(rewrites))
    compaction = CompactionConfig(at=at, tokens=16)
    played = play(
        renderer,
        env,
        lambda _: next(replies_left),
        Limits(turn_tokens=32),
        window=700,
        history=history,
        compaction=compaction,
    )
    assert played.trajectory.status.trainable
    assert trained(played) == said_by_engine(played.sampled)
    assert sum(trained(played).values()) == sum(len(reply) for _, reply in played.sampled)


def test_summaries_are_sampled_and_not_trained_if_the_flag_is_set(renderer: Renderer, raw: Raw, tmp_path: Path) -> None:
    env, limits = Diary(num_turns=6, answer="page {} " + "x" * 200), Limits(turn_tokens=64)
    config = CompactionConfig(at=0.7, tokens=40, train=False)
    played = play(renderer, env, notes(raw), limits, window=1000, compaction=config)
    summaries = [pair for pair in played.sampled if raw("my notes" + END) == pair[1]]
    others = [pair for pair in played.sampled if pair not in summaries]
    assert summaries and trained(played) == said_by_engine(others)
    for row in played.trajectory.rows[:-1]:
        assert row.spans[-1].excluded and row.spans[-1].logprobs
        assert int(row.sampled_mask.sum() - row.mask.sum()) == len(row.spans[-1].ids)
    check_record(tmp_path, renderer, played)


def test_no_summary_is_asked_for_by_default_or_if_none_fits(renderer: Renderer, raw: Raw) -> None:
    env, limits = Diary(num_turns=6, answer="page {} " + "x" * 200), Limits(turn_tokens=64)
    assert NEVER.at is None
    short = play(renderer, env, notes(raw), limits, window=800, compaction=CompactionConfig(at=0.95, tokens=40))
    assert "num_summaries" not in short.trajectory.metrics
    assert short.trajectory.stop_reason is StopReason.CONTEXT


@pytest.mark.parametrize("given_", [{"at": 0.0}, {"at": 1.0}, {"tokens": 0}])
def test_a_compaction_that_cannot_work_is_refused(given_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="compaction"):
        CompactionConfig(**given_)


def test_an_agent_outside_shortens_its_conversation_itself(renderer: Renderer) -> None:
    loop = RolloutLoop(ScriptedEngine(lambda *_: (1,)), renderer, compaction=CompactionConfig(at=0.5))
    with pytest.raises(ConfigError, match="outside"):
        ServedLoop(loop)


class Unappendable:
    """A renderer of a template behind whose replies nothing can be put exactly."""

    def __init__(self, inner: Renderer) -> None:
        self.stop_ids, self.vocab_size, self.thinking = inner.stop_ids, inner.vocab_size, inner.thinking
        self.render, self.rerender = inner.render, inner.rerender
        self.parse, self.decode = inner.parse, inner.decode

    def extend(self, ids: Sequence[int], new_messages: Sequence[Message]) -> list[int]:
        raise RenderError("a user message cannot be appended exactly")


def test_a_template_that_cannot_be_continued_is_followed_or_refused_with_the_way_out(
    renderer: Renderer, raw: Raw
) -> None:
    refused = play(Unappendable(renderer), Diary(), notes(raw)).trajectory
    assert refused.status is Status.ENV_ERROR and refused.num_trained_tokens > 0
    assert 'cannot be appended exactly; with the history "rerender"' in str(refused.error)
    followed = play(Unappendable(renderer), Diary(), notes(raw), history="rerender")
    assert followed.trajectory.status is Status.COMPLETED and len(followed.trajectory.rows) == 4
    assert trained(followed) == said_by_engine(followed.sampled)


def test_an_external_agent_gets_the_rewritten_history(renderer: Renderer, raw: Raw) -> None:
    """It goes on from the new history, and its record is that of the loop."""

    async def main() -> tuple[Trajectory, StepAnswer]:
        served = ServedLoop(RolloutLoop(ScriptedEngine(lambda *_: raw("written" + END)), renderer))
        sampler = Sampler(served, lambda task: Diary(num_turns=3, rewrites=[1]))
        playing = asyncio.ensure_future(sampler.sample([Task("Env-v0", 7)], 1))
        opening = await served.claim(5.0)
        assert opening is not None
        seat = served.session(opening.episode)
        assert seat is not None
        messages, first = list(opening.messages), None
        while True:
            reply = await seat.chat(AgentRequest(tuple(messages), opening.tools))
            answer = await seat.step(StepRequest())
            first = first or answer
            if answer.terminated:
                break
            messages += [reply.message, *answer.messages]
            messages = messages if answer.history is None else list(answer.history)
        (group,) = await playing
        return group.trajectories[0], first

    trajectory, answer = asyncio.run(main())
    assert answer.history == (Message("system", "Write."), Message("user", "You are at page 1; you wrote: written"))
    here = play(renderer, Diary(num_turns=3, rewrites=[1]), lambda _: raw("written" + END)).trajectory
    assert [row.ids.tolist() for row in trajectory.rows] == [row.ids.tolist() for row in here.rows]
    assert len(trajectory.rows) == 2


@pytest.mark.parametrize("history", ["append", "rerender"])
def test_reasoning_between_turns_is_kept_or_stripped_by_the_history_setting(
    tokenizer: ChatTokenizer, raw: Raw, tmp_path: Path, history: str
) -> None:
    template = tokenizer.template.replace("if message.reasoning_content", "if false")
    renderer = renderer_for(ChatTokenizer(tokenizer.backend, template, special_tokens=tokenizer.special_tokens))
    reply = raw(f"<think>\nHm.\n</think>\n\nwritten{END}")
    played = play(renderer, Diary(num_turns=3), lambda _: reply, history=history)
    last = renderer.decode(played.sampled[-1][0])
    assert last.count("Hm.") == (2 if history == "append" else 0)
    assert len(played.trajectory.rows) == (1 if history == "append" else 3)
    assert trained(played) == said_by_engine(played.sampled)
    check_record(tmp_path, renderer, played)
