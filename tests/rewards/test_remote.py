"""Rewards from a server that throttles, fails, hangs up, hangs, lies and recovers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentgym.chat_templates.tokenizer import LONG_TEXT
from agentgym.errors import ConfigError
from agentgym.rewards import RewardConfig, RewardFailure, open_rewards, remote
from agentgym.rewards.remote import RemoteConfig, RemoteReward
from agentgym.rollout.record.episodes_file import episode_text, trajectory_from_json
from agentgym.testing.fake_server.http import FakeHost, HttpAnswer, HttpCall
from agentgym.trajectory import Status, Trajectory

Make = Callable[..., Trajectory]
HANG = object()
OK = HttpAnswer(1.0)


@dataclass
class Server:
    """Answers by a script, the last answer for ever; the clock moves by sleeping alone."""

    script: Sequence[Any]
    calls: list[Any] = field(default_factory=list)
    sent_at: list[float] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    now: float = 0.0

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    async def _answer(self, call: HttpCall) -> HttpAnswer:
        step = self.script[min(len(self.calls), len(self.script) - 1)]
        self.calls.append(call.body)
        self.sent_at.append(self.now)
        if step is HANG:
            await asyncio.sleep(600)
        return step  # type: ignore[no-any-return]

    def serve(self, talk: Callable[[str], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            host = FakeHost({"/score": self._answer}, "127.0.0.1", 0)
            url = await host.start()
            try:
                return await talk(f"{url}/score")
            finally:
                await host.close()

        return asyncio.run(main())

    def ask(self, played: Sequence[Trajectory], **settings: Any) -> list[Any]:
        """What the client gives for the episodes, all asked for at once; a failure in its place."""

        async def talk(url: str) -> list[Any]:
            config = RemoteConfig(url=url, **settings)
            client = RemoteReward(config, {"k": 1}, 64, sleep=self._sleep, clock=lambda: self.now)
            try:
                return await asyncio.gather(
                    *(client.score([trajectory]) for trajectory in played), return_exceptions=True
                )
            finally:
                await client.close()

        return self.serve(talk)  # type: ignore[no-any-return]


def test_the_server_gets_the_episode_as_it_is_recorded_and_the_settings(episode: Make) -> None:
    server = Server([HttpAnswer({"value": 0.5, "components": {"a": 1}, "success": True})])
    played = episode("b", replies=["a"], truth="42")

    async def talk(url: str) -> list[Trajectory]:
        config = RewardConfig(remote=RemoteConfig(url=url), settings={"strict": True})
        async with open_rewards(config) as rewards:
            return await rewards.score([played])

    (scored,) = server.serve(talk)
    assert (scored.reward, scored.success, scored.metrics["reward/a"]) == (0.5, True, 1.0)
    assert server.calls[0]["settings"] == {"strict": True}
    assert trajectory_from_json(server.calls[0]["trajectory"]).turns == played.turns


@pytest.mark.parametrize("turn_tokens", [2, LONG_TEXT + 1])
def test_a_long_episode_is_encoded_beside_the_event_loop(
    episode: Make, monkeypatch: pytest.MonkeyPatch, turn_tokens: int
) -> None:
    threads = []

    def encode(trajectory: Trajectory) -> str:
        threads.append(threading.current_thread())
        return episode_text(trajectory)

    monkeypatch.setattr(remote, "episode_text", encode)
    played = episode("b", turn_tokens=turn_tokens)
    server = Server([OK])
    assert server.ask([played]) == [[1.0]]
    assert trajectory_from_json(server.calls[0]["trajectory"]) == played
    assert (threads[0] is threading.main_thread()) == (turn_tokens == 2)


@pytest.mark.parametrize(
    "failure",
    [HttpAnswer("slow down", 429), HttpAnswer("broken", 500), HttpAnswer("busy", 503), HttpAnswer(1.0, dropped=True)],
    ids=["429", "500", "503", "hangs up"],
)
def test_what_passes_is_waited_for(episode: Make, failure: HttpAnswer) -> None:
    server = Server([failure, failure, failure, OK])
    assert server.ask([episode("a")]) == [[1.0]]
    assert len(server.calls) == 4
    assert all(0.25 * 2**index <= wait <= 0.5 * 2**index for index, wait in enumerate(server.slept))


def test_a_hang_is_given_up_and_asked_again(episode: Make) -> None:
    server = Server([HANG, OK])
    assert server.ask([episode("a")], timeout_s=0.2) == [[1.0]]


def test_retry_after_is_kept_by_all(episode: Make) -> None:
    server = Server([HttpAnswer("later", 429, {"Retry-After": "40"}), OK])
    played = [episode("a", member=0), episode("b", member=1)]
    assert server.ask(played, requests_per_minute=60.0) == [[1.0]] * 2
    assert all(at >= 40 for at in server.sent_at[2:]) or server.sent_at[1] >= 40
    assert max(server.slept) >= 39


def test_requests_keep_to_the_minutes_budget(episode: Make) -> None:
    server = Server([OK])
    played = [episode("a", member=index) for index in range(6)]
    server.ask(played, requests_per_minute=60.0)
    assert server.now == pytest.approx(5.0)
    counted = Server([OK])
    tokens = played[0].num_tokens
    counted.ask(played, tokens_per_minute=60.0 * tokens)
    assert counted.now == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("failure", "words", "num_requests"),
    [
        (HttpAnswer("broken", 500), r"answered 500: broken \(after 3 requests\)", 3),
        (HANG, r"no answer within 0\.2 s \(after 3 requests\)", 3),
        (HttpAnswer("too long", 422), "answered 422: too long", 1),
        (HttpAnswer("tomorrow", 429, {"Retry-After": "86400"}), "asks to wait for 86400 s", 1),
    ],
)
def test_what_does_not_pass_fails_the_episode(episode: Make, failure: Any, words: str, num_requests: int) -> None:
    server = Server([failure])
    (error,) = server.ask([episode("a")], timeout_s=0.2, max_retries=2)
    assert isinstance(error, RewardFailure)
    with pytest.raises(RewardFailure, match=words):
        raise error
    assert len(server.calls) == num_requests


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_server_that_refuses_everything_ends_the_run(episode: Make, status: int) -> None:
    (error,) = Server([HttpAnswer("no", status)]).ask([episode("a")])
    assert isinstance(error, ConfigError)
    assert f"answered {status}" in str(error) and "reward.remote" in str(error)


@pytest.mark.parametrize("answer", ["fine", None, [1.0], {"reward": 1.0}, {"value": "high"}, "NaN"])
def test_an_answer_that_is_no_reward_fails_the_episode(episode: Make, answer: object) -> None:
    async def talk(url: str) -> list[Trajectory]:
        async with open_rewards(RewardConfig(remote=RemoteConfig(url=url))) as rewards:
            return await rewards.score([episode("a")])

    (scored,) = Server([HttpAnswer(answer)]).serve(talk)
    assert (scored.status, scored.reward) == (Status.ENV_ERROR, None)
    assert scored.error is not None and "InvalidReward" in scored.error


def test_a_token_is_sent_and_never_told(episode: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    (error,) = Server([HttpAnswer("you sent s3cret", 422)]).ask([episode("a")], api_key_env="REWARD_TOKEN")
    assert "s3cret" not in str(error) and "***" in str(error)
    with pytest.raises(ConfigError, match="NO_SUCH_TOKEN is not set"):
        RemoteReward(RemoteConfig(url="http://127.0.0.1:1", api_key_env="NO_SUCH_TOKEN"), {}, 1)


def test_an_invalid_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="begins with http://"):
        RemoteConfig(url="localhost:8000/score")
