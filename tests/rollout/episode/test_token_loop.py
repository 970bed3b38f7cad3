"""One episode: exact ids, budgets with names, and failures that become statuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Completion, Sampling, WeightSync
from agentgym.engines.scripted import ScriptedEngine, ScriptedReply
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import ConfigError
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits, SamplingConfig
from agentgym.tools import tool
from agentgym.trajectory import Source, Status, StopReason, Trajectory
from agentgym.types import MalformedCall, Message, Task, ToolSpec

Raw = Callable[[str], list[int]]
EPISODE = Episode(Task("Count-v0", 7))
END = "<|im_end|>"


class Count(TextEnv):
    """Answers with the number of the turn; ends after `num_turns`."""

    runs_inline = True
    own_split = True
    system_prompt = "Count."

    def __init__(self, num_turns: int = 3, answer: str = "turn {}") -> None:
        super().__init__()
        self.num_turns = num_turns
        self.answer = answer
        self.seen: list[str] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return f"seed {seed}", {}

    def step(self, action: str) -> StepResult:
        self.seen.append(str(action))
        over = self.turns == self.num_turns
        info: Info = {"metrics": {"success": 1.0}, "shown": [1], "hidden": object()} if over else {}
        return self.answer.format(self.turns), 0.5, over, False, info


class Dial(ToolEnv):
    """One tool that takes a digit, and one that breaks."""

    runs_inline = True
    max_turns = 9

    def start(self, options: dict[str, Any]) -> str:
        return "Dial."

    @tool
    def dial(self, digit: int) -> str:
        """Dials a digit."""
        if digit == 9:
            self.end(success=True, reward=1.0)
        return f"dialled {digit}"

    @tool
    def smash(self) -> str:
        """Breaks."""
        raise ValueError("smashed")


def play(
    renderer: Renderer,
    env: TextEnv,
    replies: Sequence[Sequence[int] | ScriptedReply],
    limits: Limits | None = None,
    **settings: Any,
) -> Trajectory:
    """The episode in which the engine says `replies` one after the other (the last one for ever)."""
    replies_left = iter(replies)
    last = replies[-1]
    engine = ScriptedEngine(lambda *_: next(replies_left, last), context_window=settings.pop("window", 1 << 20))
    trajectory = asyncio.run(RolloutLoop(engine, renderer, limits, **settings).run(env, EPISODE))
    assert not engine.sessions, "the session was not released"
    return trajectory


def text_of(renderer: Renderer, trajectory: Trajectory) -> str:
    return renderer.decode(trajectory.rows[-1].ids.tolist())


def test_an_episode_is_the_conversation_with_provenance(renderer: Renderer, raw: Raw) -> None:
    env = Count(2)
    trajectory = play(renderer, env, [raw("one" + END), raw("two" + END)])
    (row,) = trajectory.rows
    assert [span.source for span in row.spans] == [Source.PROMPT, Source.POLICY, Source.ENV, Source.POLICY]
    assert renderer.decode(row.ids.tolist()) == (
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\nseed 7<|im_end|>\n"
        "<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nturn 1<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    )
    assert row.ids[row.mask].tolist() == raw("one" + END) + raw("two" + END)
    assert (trajectory.status, trajectory.stop_reason) == (Status.COMPLETED, StopReason.TERMINATED)
    assert (trajectory.reward, trajectory.success) == (1.0, True)
    assert [turn.observation for turn in trajectory.turns] == ["turn 1", "turn 2"]
    assert env.seen == ["one", "two"]
    assert trajectory.info == {"shown": [1], "task_digest": env.task_digest}
    assert trajectory.metrics["num_turns"] == 2


@given(st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=6), min_size=1, max_size=4))
def test_any_sampled_ids_are_kept_as_they_are(renderer: Renderer, reply_ids: list[list[int]]) -> None:
    (end,) = renderer.stop_ids
    replies = [[*ids, end] for ids in reply_ids]
    trajectory = play(renderer, Count(len(reply_ids)), replies)
    spans = [span for span in trajectory.rows[0].spans if span.source is Source.POLICY]
    assert [list(span.ids) for span in spans] == replies
    assert trajectory.status is Status.COMPLETED


def test_each_prompt_continues_the_one_before_with_the_sampled_ids(renderer: Renderer, raw: Raw) -> None:
    prompts: list[list[int]] = []

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        prompts.append(list(prompt_ids))
        return raw("hi" + END)

    row = asyncio.run(RolloutLoop(ScriptedEngine(reply), renderer).run(Count(), EPISODE)).rows[0]
    assert all(row.ids.tolist()[: len(prompt)] == prompt for prompt in prompts)
    assert len(prompts) == 3


def test_every_turn_has_its_own_seed_and_the_configured_distribution(renderer: Renderer, raw: Raw) -> None:
    samplings: list[Sampling] = []

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        samplings.append(sampling)
        return raw("hi" + END)

    config = SamplingConfig(temperature=0.7, top_p=0.9, top_k=5)
    asyncio.run(RolloutLoop(ScriptedEngine(reply), renderer, Limits(turn_tokens=77), config).run(Count(), EPISODE))
    assert [sampling.seed for sampling in samplings] == [EPISODE.seed(turn) for turn in range(3)]
    assert {(sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) for sampling in samplings} == {
        (0.7, 0.9, 5, 77)
    }
    assert samplings[0].stop_ids == renderer.stop_ids


def test_max_turns_truncates(renderer: Renderer, raw: Raw) -> None:
    trajectory = play(renderer, Count(), [raw("hi" + END)], Limits(max_turns=2))
    assert (trajectory.status, trajectory.stop_reason) == (Status.TRUNCATED, StopReason.MAX_TURNS)
    assert trajectory.rows[0].spans[-1].source is Source.POLICY


def test_the_environments_own_limit_truncates(renderer: Renderer, raw: Raw) -> None:
    env = Count()
    env.max_turns = 2
    assert play(renderer, env, [raw("hi" + END)]).stop_reason is StopReason.ENV_TRUNCATED


def test_a_reply_over_its_budget_truncates_and_is_not_answered(renderer: Renderer, raw: Raw) -> None:
    env = Count()
    trajectory = play(renderer, env, [raw("hi" + END), raw("abcdefgh")], Limits(turn_tokens=4))
    assert (trajectory.status, trajectory.stop_reason) == (Status.TRUNCATED, StopReason.TURN_TOKENS)
    assert list(trajectory.rows[0].spans[-1].ids) == raw("abcd")
    assert trajectory.turns[-1].reward == 0.0
    assert env.seen == ["hi"]


def test_a_cut_reply_may_be_answered_instead(renderer: Renderer, raw: Raw) -> None:
    env = Count()
    limits = Limits(turn_tokens=4, cut_reply="answer")
    trajectory = play(renderer, env, [raw("abcdefgh"), raw("hi" + END)], limits)
    assert trajectory.status is Status.COMPLETED
    assert env.seen == ["abcd", "hi", "hi"]
    assert "abcd<|im_end|>\n<|im_start|>user\nturn 1" in text_of(renderer, trajectory)
    assert raw(END)[0] not in trajectory.rows[0].spans[1].ids, "the end that was not sampled is not trained"


@pytest.mark.parametrize("budget", ["context_window", "trajectory_tokens"])
def test_an_answer_that_does_not_fit_truncates_and_the_row_is_whole(renderer: Renderer, raw: Raw, budget: str) -> None:
    env = Count(answer="x" * 500)
    reason = StopReason.CONTEXT if budget == "context_window" else StopReason.TRAJECTORY_TOKENS
    trajectory = play(renderer, env, [raw("hi" + END)], Limits(**{budget: 300}))
    assert (trajectory.status, trajectory.stop_reason) == (Status.TRUNCATED, reason)
    assert list(trajectory.rows[0].spans[-1].ids) == raw("hi" + END)
    assert trajectory.turns[-1].observation == "x" * 500
    assert trajectory.num_tokens <= 300


@pytest.mark.parametrize("budget", ["context_window", "trajectory_tokens"])
@given(size=st.integers(90, 400), turn_tokens=st.integers(21, 60))
def test_prompt_and_reply_stay_within_every_budget(
    renderer: Renderer, raw: Raw, budget: str, size: int, turn_tokens: int
) -> None:
    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        assert len(prompt_ids) + sampling.max_tokens <= size
        return raw("y" * 20 + END)

    loop = RolloutLoop(ScriptedEngine(reply), renderer, Limits(turn_tokens=turn_tokens, **{budget: size}))
    trajectory = asyncio.run(loop.run(Count(9), EPISODE))
    assert trajectory.num_tokens <= size
    assert trajectory.status is not Status.ENGINE_ERROR


def test_a_first_prompt_that_fills_the_window_is_an_error_with_advice(renderer: Renderer, raw: Raw) -> None:
    trajectory = play(renderer, Count(), [raw("hi" + END)], window=20)
    assert trajectory.status is Status.ENV_ERROR
    assert "leaves none of the 20 (context) for a reply: shorten" in str(trajectory.error)


def test_bad_calls_are_answered_counted_and_do_not_end_the_episode(renderer: Renderer, raw: Raw) -> None:
    def call(body: str) -> str:
        return f"<tool_call>\n{body}\n</tool_call>"

    replies = [
        call("{oops") + call('{"name": "dial", "arguments": {"digit": 1}}'),
        call('{"name": "fly", "arguments": {}}'),
        call('{"name": "dial", "arguments": {"digit": "many"}}'),
        call('{"name": "smash", "arguments": {}}'),
        '<tool_call>\n{"name": "dial", "argu',
        call('{"name": "dial", "arguments": {"digit": 9}}'),
    ]
    trajectory = play(renderer, Dial(), [raw(reply + END) for reply in replies])
    assert trajectory.status is Status.COMPLETED
    counted = {"num_tool_calls": 7, "malformed_calls": 1, "truncated_calls": 1}
    counted |= {"unknown_tools": 1, "invalid_arguments": 1, "tool_errors": 1}
    assert counted.items() <= trajectory.metrics.items()
    kinds = [result.error for turn in trajectory.turns for result in turn.tool_results]
    assert kinds == ["malformed", None, "unknown_tool", "invalid_arguments", "tool_error", "truncated", None]
    cut = trajectory.turns[4].message.tool_calls[0]
    assert isinstance(cut, MalformedCall) and cut.raw.endswith('"argu')
    for turn in trajectory.turns:
        assert [call.id for call in turn.message.tool_calls] == [result.call_id for result in turn.tool_results]


class Broken(Count):
    """Goes wrong in the way it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        if self.where == "reset":
            raise ValueError("no world\nsecond line")
        return "go", {"messages": "nonsense"} if self.where == "messages" else {}

    def step(self, action: str) -> StepResult:
        if self.turns < 2:
            return "on", 1.0, False, False, {}
        if self.where == "exit":
            raise SystemExit(3)
        if self.where == "shape":
            return "too short", 1.0  # type: ignore[return-value]
        if self.where == "metrics":
            return "", 1.0, True, False, {"metrics": {"success": "yes"}}
        if self.where == "reward":
            return "", float("nan"), True, False, {}
        raise KeyError("door")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("reset", "ValueError: no world"),
        ("step", "KeyError: 'door'"),
        ("exit", "sys.exit(3)"),
        ("messages", 'info["messages"] is a tuple of Message'),
        ("metrics", "info[\"metrics\"]['success'] is a finite number, at most 1e+100; got 'yes'"),
        ("reward", "the reward is a finite number, at most 1e+100; got nan"),
        ("shape", "Broken.step returned ('too short', 1.0); it must be a tuple of 5 values"),
    ],
)
@pytest.mark.parametrize("runs_inline", [True, False])
def test_a_failing_environment_is_a_status_with_its_traceback_and_no_reward(
    renderer: Renderer, raw: Raw, where: str, message: str, runs_inline: bool
) -> None:
    env = Broken(where)
    env.runs_inline = runs_inline
    trajectory = play(renderer, env, [raw("hi" + END)])
    assert (trajectory.status, trajectory.stop_reason) == (Status.ENV_ERROR, StopReason.ENV_ERROR)
    assert message in str(trajectory.error)
    assert trajectory.reward is None
    assert trajectory.info["replay"] == "agentgym play Count-v0 --seed 7"
    assert len(trajectory.turns) == (0 if where in ("reset", "messages") else 2)
    if where in ("reset", "step"):
        trace = str(trajectory.info["traceback"])
        assert "in " + where in trace
        assert "rollout/home" not in trace


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, SystemExit])
def test_an_interrupt_that_a_tool_raises_ends_its_episode_and_not_the_run(
    renderer: Renderer, raw: Raw, error: type[BaseException]
) -> None:
    class Odd(ToolEnv):
        def start(self, options: dict[str, Any]) -> str:
            return "go"

        @tool
        def leave(self) -> str:
            """Leaves."""
            raise error

    call = '<tool_call>\n{"name": "leave", "arguments": {}}\n</tool_call>'
    trajectory = play(renderer, Odd(), [raw(call + END)])
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert f"tool 'leave' raised {error.__name__}" in str(trajectory.error)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (ScriptedReply(fault="raise"), "asked for a failure"),
        (ScriptedReply((1, 2), fault="lengths"), "equal lengths"),
        (ScriptedReply(()), "without a single id"),
        (ScriptedReply((1, 1 << 21)), "outside of its vocabulary"),
        (ScriptedReply((1, 2), logprobs=(0.5, -0.5)), "not finite or above 0"),
        (ScriptedReply((1, 2), logprobs=(float("nan"), -0.5)), "not finite or above 0"),
    ],
)
def test_a_failing_engine_is_a_status_and_keeps_what_was_played(
    renderer: Renderer, raw: Raw, reply: ScriptedReply, message: str
) -> None:
    trajectory = play(renderer, Count(), [raw("hi" + END), reply])
    assert (trajectory.status, trajectory.reward) == (Status.ENGINE_ERROR, None)
    assert message in str(trajectory.error)
    assert len(trajectory.turns) == 1


def test_a_reply_that_is_given_up_resumes_from_its_exact_ids(renderer: Renderer, raw: Raw) -> None:
    whole = raw("hello" + END)

    async def main() -> Trajectory:
        engine = ScriptedEngine(lambda *_: whole, token_s=0.005, on_update="abort")
        episode = asyncio.ensure_future(RolloutLoop(engine, renderer).run(Count(1), EPISODE))
        await asyncio.sleep(0.018)
        await engine.update_weights({}, 4)
        return await episode

    trajectory = asyncio.run(main())
    reply = trajectory.rows[0].spans[1]
    assert list(reply.ids) == whole
    assert set(reply.policy_versions or ()) == {0, 4}
    assert trajectory.turns[0].finish_reason == "stop"


def test_a_reply_that_is_given_up_when_it_has_just_ended_has_ended(renderer: Renderer, raw: Raw) -> None:
    class Late(ScriptedEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
            return replace(await super().generate(prompt_ids, sampling, session=session), finish_reason="abort")

    engine = Late(lambda *_: raw("hello" + END))
    trajectory = asyncio.run(RolloutLoop(engine, renderer).run(Count(1), EPISODE))
    assert trajectory.turns[0].finish_reason == "stop"
    assert list(trajectory.rows[0].spans[1].ids) == raw("hello" + END)
    assert engine.num_requests == 1


def test_a_session_that_is_not_released_in_time_is_named_with_the_reason(
    renderer: Renderer, raw: Raw, warnings_of: Callable[[], list[str]]
) -> None:
    class Stuck(ScriptedEngine):
        async def abort(self, session: str) -> None:
            await asyncio.sleep(60)

    engine = Stuck(lambda *_: raw("hi" + END))
    loop = RolloutLoop(engine, renderer, Limits(close_s=0.01))
    assert asyncio.run(loop.run(Count(1), EPISODE)).status is Status.COMPLETED
    (warning,) = warnings_of()
    assert warning.startswith("the engine did not release session") and warning.endswith(": TimeoutError")


def test_an_engine_that_gives_up_for_ever_is_an_engine_error(renderer: Renderer) -> None:
    class Never(ScriptedEngine):
        async def update_weights(self, weights: object, version: int) -> WeightSync:
            return WeightSync(version=version)

    engine = Never(lambda *_: ScriptedReply((1,), fault="abort"))
    engine._unfinished = _Forgetful()  # type: ignore[assignment]
    trajectory = asyncio.run(RolloutLoop(engine, renderer).run(Count(), EPISODE))
    assert trajectory.status is Status.ENGINE_ERROR
    assert "without a new id" in str(trajectory.error)


class _Forgetful(dict[str, object]):
    def __setitem__(self, key: str, value: object) -> None: ...


def test_an_episode_past_its_deadline_is_a_timeout(renderer: Renderer) -> None:
    trajectory = play(renderer, Count(), [ScriptedReply((1,), fault="hang")], Limits(deadline_s=0.05))
    assert (trajectory.status, trajectory.stop_reason) == (Status.TIMEOUT, StopReason.DEADLINE)
    assert "over 0.05 s (limits.deadline_s)" in str(trajectory.error)


def test_an_episode_that_ends_by_itself_leaves_its_environment_open(renderer: Renderer, raw: Raw) -> None:
    env = Count(1)
    env.runs_inline = False
    for _ in range(2):
        assert play(renderer, env, [raw("hi" + END)]).status is Status.COMPLETED


class Stripping:
    """A renderer whose template drops the text before the last word of old replies."""

    def __init__(self, inner: Renderer) -> None:
        self._inner = inner
        self.stop_ids, self.vocab_size, self.thinking = inner.stop_ids, inner.vocab_size, inner.thinking
        self.extend, self.parse, self.decode = inner.extend, inner.parse, inner.decode

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        messages_kept = [
            Message("assistant", message.content.split()[-1]) if message.role == "assistant" else message
            for message in messages
        ]
        return self._inner.render(messages_kept, tools)

    rerender = render


def test_append_gives_one_row_and_rerender_one_for_each_rewrite(renderer: Renderer, raw: Raw) -> None:
    replies = [raw("think one" + END), raw("two" + END), raw("three" + END)]
    append = play(Stripping(renderer), Count(), replies)
    rerender = play(Stripping(renderer), Count(), replies, history="rerender")
    assert [len(append.rows), len(rerender.rows)] == [1, 2]
    assert append.num_trained_tokens == rerender.num_trained_tokens == sum(map(len, replies))
    assert "think one" in renderer.decode(rerender.rows[0].ids.tolist())
    assert "think" not in text_of(renderer, rerender)


def test_rerender_makes_no_row_where_the_template_rewrites_nothing(renderer: Renderer) -> None:
    (end,) = renderer.stop_ids
    split = [[104, 105, end]]
    assert len(play(renderer, Count(), split, history="rerender").rows) == 1


def test_settings_that_cannot_work_are_refused_at_once(renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match="the tokenizer that belongs to the model"):
        RolloutLoop(ScriptedEngine(lambda *_: (1,), vocab_size=100), renderer)
    with pytest.raises(ConfigError, match='"append" or "rerender"'):
        RolloutLoop(ScriptedEngine(lambda *_: (1,)), renderer, history="forget")  # type: ignore[arg-type]
