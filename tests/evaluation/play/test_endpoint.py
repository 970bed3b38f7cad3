"""An evaluation against a chat endpoint: checked first, resumed after a failure, and what it took counted once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.engines.openai.endpoint import ChatEndpointConfig
from agentgym.errors import AgentGymError, ConfigError, InvalidTrajectory, TrainingHalted, UnknownName
from agentgym.evaluation import EvalConfig, EvalResult, evaluate, verify_run
from agentgym.evaluation.play.endpoint import Quantiles
from agentgym.testing.fake_server.faults import Faults
from agentgym.testing.fake_server.server import FakeConfig, FakeSglang
from agentgym.trajectory import Trajectory
from agentgym.viewer import read_run

Start = Callable[..., Any]
ECHO = '''
from agentgym.envs import TextEnv


class Echo(TextEnv):
    """Goes on for three turns, with whatever is said."""

    max_turns = 3
    runs_inline = True

    def reset(self, *, seed=None, options=None):
        self.turn = 0
        return f"Task {seed}.", {}

    def step(self, action):
        self.turn += 1
        return f"Again, {self.turn}.", 0.5, self.turn == 3, False, {}
'''


@pytest.fixture
def echo(tmp_path: Path) -> str:
    (tmp_path / "echo.py").write_text(ECHO, encoding="utf-8")
    return f"{tmp_path / 'echo.py'}:Echo"


def play(url: str, env: str, folder: Path, *, resume: bool = False, **settings: Any) -> EvalResult:
    endpoint = ChatEndpointConfig(**{"max_retries": 0, **settings.pop("endpoint", {})})
    config = EvalConfig(env=env, policy=url, endpoint=endpoint, **{"num_tasks": 4, "turn_tokens": 16, **settings})
    return evaluate(config, output=folder, resume=resume)


def test_it_plays_and_reports_results_tokens_and_time(chat_endpoint: Start, echo: str, tmp_path: Path) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hm.", usage=(50, 20, 5)))
    result = play(endpoint.url, echo, tmp_path / "run", endpoint={"price_prompt": 1.0, "price_completion": 4.0})
    assert result.summary.num_episodes == 4 and result.summary.mean_reward == 1.5
    assert result.summary.mean_tokens == 15.0  # five for each of three replies, as the endpoint counts
    use = result.use
    assert use is not None and use.latency_s is not None and use.first_token_s is not None
    assert (use.num_requests, use.num_retries, use.num_without_ids) == (12, 0, 4)
    assert (use.prompt_tokens, use.cached_tokens, use.completion_tokens) == (600, 240, 60)
    assert use.cost == pytest.approx((600 * 1 + 60 * 4) / 1e6)
    assert 0 < use.first_token_s.p50 <= use.latency_s.p50 <= use.latency_s.p95
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["use"]["requests"] == 12 and stored["endpoint"]["model"] == "test-model"
    assert stored["policy"] == f"{endpoint.url}/v1"


def test_verify_and_the_report_note_missing_ids(chat_endpoint: Start, echo: str, tmp_path: Path) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hm."))
    play(endpoint.url, echo, tmp_path / "run")
    report = verify_run(tmp_path / "run")
    assert report.ok and report.num_tokens == 0 and report.num_without_ids == 4
    assert "4 of 4 episodes hold no token ids" in "\n".join(report.lines())
    checked = {verdict.about.name: verdict.num_checked for verdict in report.verdicts}
    assert checked["reward"] == checked["status"] == 4 and checked["tool_answers"] == 12 and checked["spans"] == 0
    episodes = read_run(tmp_path / "run").episodes
    assert [(episode.num_tokens, episode.num_sampled_tokens) for episode in episodes] == [(39, 9)] * 4


def test_rows_that_are_taken_away_are_missed(chat_endpoint: Start, tmp_path: Path) -> None:
    evaluate(EvalConfig(env="GuessNumber-v0", policy="oracle", num_tasks=2), output=tmp_path / "run")
    path = tmp_path / "run" / "episodes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["rows"] = []
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = verify_run(tmp_path / "run")
    assert not report.ok and "only a chat endpoint's episode may hold none" in "\n".join(report.lines())


def test_an_endpoint_that_dies_leaves_what_it_played_and_resume_counts_nothing_twice(
    chat_endpoint: Start, echo: str, tmp_path: Path
) -> None:
    make_reply = chat_endpoint.make_reply

    def dying(body: dict[str, Any], number: int) -> Any:
        return make_reply(content="Hm.", usage=(50, 0, 5)) if number < 14 else make_reply(status=503, body="gone")

    endpoint = chat_endpoint(dying)
    settings: dict[str, Any] = {"num_tasks": 10, "concurrency": 1}
    with pytest.raises(TrainingHalted, match="answered 503"):
        play(endpoint.url, echo, tmp_path / "run", **settings)
    lines = (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines[:5]] == ["completed"] * 4 + ["engine_error"]
    assert json.loads(lines[4])["reward"] is None

    endpoint.script = lambda body, number: make_reply(content="Hm.", usage=(50, 0, 5))
    num_before = len(endpoint.bodies)
    result = play(endpoint.url, echo, tmp_path / "run", resume=True, **settings)
    assert len(endpoint.bodies) - num_before == 6 * 3
    assert result.summary.num_episodes == 10 and result.summary.num_failed == 0
    assert result.use is not None
    assert (result.use.num_requests, result.use.prompt_tokens, result.use.completion_tokens) == (30, 1500, 150)


@pytest.mark.long
def test_failures_on_the_way_are_survived_and_counted_apart(echo: str, tmp_path: Path) -> None:
    rates = {"error": 0.1, "drop": 0.05, "busy": 0.05}
    faults = Faults(rates=rates, schedule={5: "hang"}, retry_after_s=0.05, seed=3)
    with FakeSglang(FakeConfig(faults=faults)) as server:
        result = play(server.url, echo, tmp_path / "run", num_tasks=12, endpoint={"max_retries": 8, "timeout_s": 1.0})
    assert result.summary.num_episodes == 12 and result.summary.num_failed == 0
    assert result.use is not None and result.use.num_retries > 0 and result.use.num_without_ids == 0
    replies = sum(len(trajectory.turns) for trajectory in result.trajectories)
    assert result.use.num_requests == replies + result.use.num_retries
    assert result.use.completion_tokens == sum(trajectory.num_trained_tokens for trajectory in result.trajectories)
    report = verify_run(tmp_path / "run")
    assert report.ok, "\n".join(report.lines())


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"endpoint": {"model": "tset-model"}}, UnknownName, "did you mean 'test-model'"),
        ({"env": "TextGme-v0"}, UnknownName, "did you mean 'TextGame-v0'"),
        ({"policy": "http://127.0.0.1:9"}, AgentGymError, "no endpoint answers at http://127.0.0.1:9/v1"),
        ({"policy": "127.0.0.1:8000"}, UnknownName, "did you mean 'http://127.0.0.1:8000'"),
        ({"policy": "http://user:pw@127.0.0.1"}, ConfigError, "a key belongs into an environment variable"),
    ],
)
def test_what_cannot_be_asked_writes_nothing(
    settings: dict[str, Any], error: type[Exception], message: str, chat_endpoint: Start, echo: str, tmp_path: Path
) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hm."))
    url, env = settings.pop("policy", endpoint.url), settings.pop("env", echo)
    with pytest.raises(error) as caught:
        play(url, env, tmp_path / "run", **settings)
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists() and endpoint.bodies == []


def test_a_key_that_is_refused_in_mid_evaluation_ends_it_at_once(
    chat_endpoint: Start, echo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-123")
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hm."))

    def revoked(body: dict[str, Any], number: int) -> Any:
        return (
            chat_endpoint.make_reply(content="Hm.")
            if number < 3
            else chat_endpoint.make_reply(status=401, body="sk-secret-123?")
        )

    endpoint.script = revoked
    with pytest.raises(ConfigError, match=r"OPENAI_API_KEY.*\*\*\*"):
        play(endpoint.url, echo, tmp_path / "run", concurrency=1)
    assert len(endpoint.bodies) == 4
    for path in (tmp_path / "run").iterdir():
        assert "sk-secret" not in path.read_text()


def test_an_episode_without_ids_is_not_trained_on(chat_endpoint: Start, echo: str, tmp_path: Path) -> None:
    from agentgym.trainers.batch.credits import credit_groups
    from agentgym.trajectory import Group

    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hm."))
    played: tuple[Trajectory, ...] = play(endpoint.url, echo, tmp_path / "run", num_tasks=1, num_repeats=2).trajectories
    group = Group(played[0].group, played[0].task, played)
    with pytest.raises(InvalidTrajectory, match="holds no exact ids and cannot be trained on"):
        credit_groups([group], "grpo")


def test_quantiles_are_those_of_the_nearest_rank() -> None:
    assert Quantiles.of([]) is None
    assert Quantiles.of([3.0]) == Quantiles(3.0, 3.0)
    assert Quantiles.of([float(value) for value in range(100, 0, -1)]) == Quantiles(50.0, 95.0)
