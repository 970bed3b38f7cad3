"""An episode through a chat endpoint is an episode like any other; its record says what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.chat_templates import renderer_for
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.embedded import embedded_folder
from agentgym.engines.openai.endpoint import ChatEndpoint, ChatEndpointConfig
from agentgym.engines.protocol import Sampling
from agentgym.envs import TextEnv, ToolEnv
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.rollout import Episode, EpisodeWriter, Limits, SamplingConfig, trajectory_from_json, trajectory_to_json
from agentgym.rollout.episode.chat_loop import ChatLoop
from agentgym.testing.fake_server.server import FakeConfig, FakeSglang
from agentgym.tools import tool
from agentgym.trajectory import Source, Status, StopReason, Trajectory
from agentgym.types import MalformedCall, Message, Task

Start = Callable[..., Any]
TASK = Task("Lock-v0", 7)
REFUSED = {"error": {"message": "This model's maximum context length is 10 tokens."}}


class Lock(ToolEnv):
    """Opens at 4."""

    system_prompt = "Open the lock."
    max_turns = 8

    def start(self, options: Any) -> str:
        return "It has a dial from 0 to 9."

    @tool
    def turn(self, digit: int) -> str:
        """Turns the dial to a digit."""
        if digit == 4:
            self.end(success=True, reward=1.0)
            return "It opens."
        return "It stays closed."


class Echo(TextEnv):
    """Goes on for three turns, with whatever is said."""

    max_turns = 3
    runs_inline = True

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.turn = 0
        return "Say something.", {}

    def step(self, action: str) -> Any:
        self.turn += 1
        return f"Again, {self.turn}.", 0.25, self.turn == 3, False, {}


def play(
    url: str,
    env: Any = None,
    limits: Limits | None = None,
    config: ChatEndpointConfig | None = None,
    sampling: SamplingConfig | None = None,
) -> Trajectory:
    async def main() -> Trajectory:
        endpoint = ChatEndpoint(url, config or ChatEndpointConfig(max_retries=0))
        loop = ChatLoop(endpoint, limits, sampling)
        try:
            await endpoint.open()
            return await loop.run(env or Lock(), Episode(TASK))
        finally:
            await loop.close()

    return asyncio.run(main())


def turn(*digits: object) -> list[tuple[str, str, str]]:
    return [(f"call_{digit}", "turn", f'{{"digit": {digit}}}') for digit in digits]


def test_tools_are_called_answered_and_counted_as_with_any_engine(chat_endpoint: Start) -> None:
    make_reply = chat_endpoint.make_reply
    replies = [
        make_reply(calls=turn(1, 2)),
        make_reply(calls=[("call_x", "turn", '{"digit":')]),
        make_reply(calls=turn(4)),
    ]
    endpoint = chat_endpoint(lambda body, number: replies[number])
    played = play(endpoint.url)
    assert (played.status, played.reward, played.success) == (Status.COMPLETED, 1.0, True)
    assert [result.content for result in played.turns[0].tool_results] == ["It stays closed."] * 2
    assert isinstance(played.turns[1].message.tool_calls[0], MalformedCall)
    assert played.turns[1].tool_results[0].error == "malformed" and played.turns[1].tool_results[0].call_id == "call_x"
    assert played.metrics["num_tool_calls"] == 4 and played.metrics["malformed_calls"] == 1
    roles = [message["role"] for message in endpoint.bodies[2]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant", "tool"]
    assert endpoint.bodies[0]["tools"][0]["function"]["name"] == "turn"


def test_without_ids_the_record_notes_it_and_counts_by_usage(chat_endpoint: Start) -> None:
    make_reply = chat_endpoint.make_reply
    endpoint = chat_endpoint(lambda body, number: make_reply(calls=turn(4 * number), usage=(100, 30, 9)))
    config = ChatEndpointConfig(price_prompt=1.0, price_completion=10.0)
    played = play(endpoint.url, config=config)
    assert played.rows == () and not played.has_ids and len(played.turns) == 2 and played.num_tokens == 0
    counts = {"num_requests": 2, "num_retries": 0, "prompt_tokens": 200, "cached_tokens": 60, "completion_tokens": 18}
    assert {name: played.metrics[name] for name in counts} == counts
    assert played.metrics["cost"] == pytest.approx((200 * 1 + 18 * 10) / 1e6)
    noted: Any = played.info["chat_endpoint"]
    assert noted["model"] == "test-model" and noted["token_ids"] is False
    assert len(noted["latency_s"]) == len(noted["first_token_s"]) == 2
    assert [message["role"] for message in noted["opening"]] == ["system", "user"]
    assert trajectory_from_json(trajectory_to_json(played)) == played


def test_a_prompt_that_goes_on_extends_the_row_and_any_other_begins_one(chat_endpoint: Start) -> None:
    ids = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 2, 9, 9], [7, 8])]
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hm.", ids=ids[number]))
    for stream in (True, False):
        endpoint.bodies.clear()
        played = play(endpoint.url, Echo(), config=ChatEndpointConfig(stream=stream))
        assert played.has_ids and played.status is Status.COMPLETED
        assert [row.ids.tolist() for row in played.rows] == [[1, 2, 3, 4, 5, 6], [1, 2, 9, 9, 7, 8]]
        assert [row.mask.astype(int).tolist() for row in played.rows] == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1]]
        assert [span.source for span in played.rows[0].spans][2] is Source.ENV
        assert played.rows[1].logprobs.tolist() == [0, 0, 0, 0, -0.5, -0.5]


def test_one_reply_without_ids_leaves_the_episode_without_any(chat_endpoint: Start) -> None:
    make_reply = chat_endpoint.make_reply
    ids = [([1, 2], [3, 4]), None, ([1, 2, 9], [7])]
    endpoint = chat_endpoint(lambda body, number: make_reply(content="Hm.", ids=ids[number]))
    played = play(endpoint.url, Echo())
    assert played.rows == () and len(played.turns) == 3 and not played.has_ids


def test_a_real_prefix_gives_one_row() -> None:
    with FakeSglang(FakeConfig()) as server:
        played = play(server.url, Echo(), Limits(turn_tokens=6, cut_reply="answer"))
    assert played.has_ids and played.num_trained_tokens == played.metrics["completion_tokens"]
    assert sum(len(row) for row in played.rows) == played.num_tokens > played.num_trained_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_the_servers_and_stays_in_the_text(stream: bool, tmp_path: Path) -> None:
    renderer = renderer_for(embedded_folder())
    assert isinstance(renderer, TemplateRenderer)
    ids = renderer.tokenizer.encode("<answer>4</answer> or 5")
    with FakeSglang(FakeConfig(reply=lambda *_: ids)) as server:
        sampling = SamplingConfig(stop=("</answer>",))
        played = play(server.url, Echo(), sampling=sampling, config=ChatEndpointConfig(stream=stream))
    assert [turn.message.content for turn in played.turns] == ["<answer>4</answer>"] * len(played.turns)
    assert {(turn.finish_reason, turn.stop) for turn in played.turns} == {("stop", "</answer>")}
    with EpisodeWriter(tmp_path) as writer:
        writer.write([played])
    assert verify_run(tmp_path, renderer).ok


def test_marks_that_a_server_leaves_in_the_text_are_read(
    chat_endpoint: Start, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [
        '<think>\nFour?\n</think>\n\nI turn.\n<tool_call>\n{"name": "turn", "arguments": {"digit": 1}}\n</tool_call>',
        "<tool_call>\n{turn 4}\n</tool_call>",
        '<tool_call>\n{"name": "turn", "arguments": {"digit": 4}}\n</tool_call>',
    ]
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content=texts[number]))
    played = play(endpoint.url)
    assert played.status is Status.COMPLETED and played.metrics["malformed_calls"] == 1
    assert played.turns[0].message.reasoning == "Four?" and played.turns[0].message.content == "I turn."
    contents = [message.get("content") for message in endpoint.bodies[2]["messages"]]
    assert contents[2] == texts[0] and contents[4] == texts[1]  # word for word, as it was sampled
    assert [record.getMessage() for record in caplog.records if "leaves tool calls in the text" in record.getMessage()]
    endpoint.bodies.clear()
    plain = play(endpoint.url, limits=Limits(max_turns=1), config=ChatEndpointConfig(text_marks=False))
    assert plain.turns[0].message == Message("assistant", texts[0])


def test_an_endpoint_that_fails_is_an_engine_error_and_no_zero(chat_endpoint: Start) -> None:
    make_reply = chat_endpoint.make_reply
    endpoint = chat_endpoint(
        lambda body, number: make_reply(content="Hm.") if number == 0 else make_reply(status=500, body="dead")
    )
    played = play(endpoint.url, Echo())
    assert (played.status, played.stop_reason) == (Status.ENGINE_ERROR, StopReason.ENGINE_ERROR)
    assert played.reward is None and "answered 500" in str(played.error)
    assert played.metrics["num_requests"] == 2 and played.metrics["num_retries"] == 1
    assert played.metrics["prompt_tokens"] == 10 and len(played.turns) == 1


@pytest.mark.parametrize("finish", ["content_filter", "SAFETY", "sensitive"])
def test_a_filtered_reply_is_an_engine_error_with_its_own_count_and_no_reward(
    finish: str, chat_endpoint: Start
) -> None:
    make_reply = chat_endpoint.make_reply
    endpoint = chat_endpoint(
        lambda body, number: make_reply(content="Hm.") if number == 0 else make_reply(content="So", finish=finish)
    )
    played = play(endpoint.url, Echo())
    assert played.status is Status.ENGINE_ERROR and played.reward is None and len(played.turns) == 1
    assert played.error == f"the endpoint's content filter: the reply was withheld (finish reason {finish})"
    assert played.metrics["filtered_replies"] == 1 and played.metrics["num_requests"] == 2 == len(endpoint.bodies)
    noted: Any = played.info["chat_endpoint"]
    assert noted["failures"] == {"content_filter": 1}
    assert trajectory_from_json(trajectory_to_json(played)) == played


def test_the_record_has_the_sampling_settings_that_the_model_refused(chat_endpoint: Start) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hm."))
    endpoint.refused = ("temperature",)
    played = play(endpoint.url, Echo(), sampling=SamplingConfig(temperature=0.5))
    noted: Any = played.info["chat_endpoint"]
    assert noted["left_out"] == ["temperature"] and noted["failures"] == {"unsupported_feature": 1}


def test_a_time_out_is_an_engine_error(chat_endpoint: Start) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(hangs=True))
    played = play(endpoint.url, config=ChatEndpointConfig(timeout_s=0.2, max_retries=0))
    assert played.status is Status.ENGINE_ERROR and "no answer within 0.2 s" in str(played.error)


def test_a_full_window_truncates_and_at_the_first_prompt_fails_the_environment(
    chat_endpoint: Start,
) -> None:
    make_reply = chat_endpoint.make_reply
    endpoint = chat_endpoint(
        lambda body, number: make_reply(content="Hm.") if number == 0 else make_reply(status=400, body=REFUSED)
    )
    played = play(endpoint.url, Echo())
    assert (played.status, played.stop_reason) == (Status.TRUNCATED, StopReason.CONTEXT)
    assert played.reward == 0.25 and len(played.turns) == 1
    first = play(endpoint.url, Echo())
    assert first.status is Status.ENV_ERROR and "first prompt does not fit" in str(first.error)


@pytest.mark.parametrize(
    ("limits", "reason", "num_turns"),
    [
        (Limits(turn_tokens=3), StopReason.TURN_TOKENS, 1),
        (Limits(trajectory_tokens=16, turn_tokens=9), StopReason.TRAJECTORY_TOKENS, 1),
        (Limits(context_window=14), StopReason.CONTEXT, 1),
        (Limits(max_turns=2, turn_tokens=3, cut_reply="answer"), StopReason.MAX_TURNS, 2),
    ],
)
def test_budgets_go_by_what_the_endpoint_used(
    limits: Limits, reason: StopReason, num_turns: int, chat_endpoint: Start
) -> None:
    make_reply = chat_endpoint.make_reply

    def script(body: dict[str, Any], number: int) -> Any:
        cut = reason in (StopReason.TURN_TOKENS, StopReason.MAX_TURNS)
        return make_reply(content="Hm.", finish="length" if cut else "stop", usage=(13 + 3 * number, 0, 3))

    endpoint = chat_endpoint(script)
    played = play(endpoint.url, Echo(), limits)
    assert (played.status, played.stop_reason, len(played.turns)) == (Status.TRUNCATED, reason, num_turns)


def test_the_window_is_the_one_that_the_endpoint_lists(chat_endpoint: Start) -> None:
    models = ({"id": "small", "max_model_len": 40},)
    endpoint = chat_endpoint(
        lambda body, number: chat_endpoint.make_reply(content="Hm.", usage=(20, 0, 8)), models=models
    )
    played = play(endpoint.url, Echo(), Limits(turn_tokens=512))
    assert played.status is Status.COMPLETED
    assert [body["max_tokens"] for body in endpoint.bodies] == [40, 12, 12]


def test_a_judge_scores_an_episodes_text(chat_endpoint: Start) -> None:
    def script(body: dict[str, Any], number: int) -> Any:
        asks_judge = body["messages"][-1]["content"].startswith("Rate")
        return chat_endpoint.make_reply(content="7" if asks_judge else "A poem.")

    endpoint = chat_endpoint(script)

    class Essay(Echo):
        """Asks a judge what a text is worth: a sync environment opens one for each question."""

        runs_inline = False

        def step(self, action: str) -> Any:
            async def ask() -> str:
                async with ChatEndpoint(endpoint.url) as judge:
                    question = Message("user", f"Rate this text from 0 to 10, with a number alone.\n\n{action}")
                    reply = await judge.complete([question], sampling=Sampling(max_tokens=8, temperature=0.0))
                    return reply.message.content

            return "Thank you.", float(asyncio.run(ask())) / 10, True, False, {}

    class AsyncEssay(TextEnv):
        """The same as an async environment."""

        max_turns = 1

        async def areset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.judge = ChatEndpoint(endpoint.url)
            return "Write.", {}

        async def astep(self, action: str) -> Any:
            reply = await self.judge.complete([Message("user", f"Rate this: {action}")])
            await self.judge.close()
            return "Thank you.", float(reply.message.content) / 10, True, False, {}

    for env in (Essay(), AsyncEssay()):
        played = play(endpoint.url, env)
        assert (played.status, played.reward) == (Status.COMPLETED, 0.7), played.error
