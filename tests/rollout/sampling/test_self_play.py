"""Self-play: two trajectories of one game, who waits for whom, and what a failure of one seat does to the other."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import ScriptedEngine, ScriptedReply
from agentgym.envs.games.tic_tac_toe import TicTacToe
from agentgym.errors import ConfigError, TrainingHalted
from agentgym.rewards import RewardConfig, open_rewards
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.replies import reply_ids
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.sampling.sampler import SamplerConfig
from agentgym.rollout.sampling.self_play import SelfPlaySampler, group_of
from agentgym.trajectory import Status, StopReason, Trajectory
from agentgym.types import Message, Task

Script = Callable[[str, int, int], str | ScriptedReply]
"""What a seat says in a game at a turn of its own."""
SESSION = re.compile(r"0/(\d+):([XO])-(\d+)$")
TASK = Task("TicTacToe-v0", 1, kwargs={"opponent": "self"})
DRAWN = {"X": "15672", "O": "39482"}
X_WINS = {"X": "123", "O": "456"}


def scripted(renderer: Renderer, script: Script, **limits: Any) -> RolloutLoop:
    """A loop whose replies are those of the script."""
    turns: dict[str, int] = {}

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int] | ScriptedReply:
        match = SESSION.search(session)
        assert match is not None
        turns[session] = turns.get(session, -1) + 1
        answer = script(match.group(2), int(match.group(3)), turns[session])
        if isinstance(answer, ScriptedReply):
            return answer
        return reply_ids(renderer, Message("assistant", answer))

    engine = ScriptedEngine(reply, vocab_size=renderer.vocab_size)
    return RolloutLoop(engine, renderer, Limits(**{"max_turns": 8, "turn_tokens": 8, **limits}))


def games(number: int, seats: Sequence[str] = ("X", "O")) -> list[Episode]:
    return [Episode(TASK, group_of("0/0", seat), game, seat=seat) for game in range(number) for seat in seats]


def play(loop: RolloutLoop, number: int = 1, **settings: Any) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        sampler = SelfPlaySampler(loop, config=SamplerConfig(max_failure_rate=1.0, **settings))
        try:
            return await asyncio.wait_for(sampler.run(games(number)), 20)
        finally:
            sampler.close()

    return asyncio.run(run())


def test_a_game_gives_a_trajectory_to_each_seat(renderer: Renderer) -> None:
    cross, nought = play(scripted(renderer, lambda seat, _, turn: X_WINS[seat][turn]))
    assert (cross.group, nought.group) == ("0/0:X", "0/0:O")
    assert [turn.message.content for turn in cross.turns] == ["1", "2", "3"]
    assert [turn.message.content for turn in nought.turns] == ["4", "5"]
    assert [turn.observation for turn in cross.turns] == ["X23\nO56\n789", "XX3\nOO6\n789", "XXX\nOO6\n789\nYou win."]
    assert [turn.observation for turn in nought.turns] == ["OO3\nX56\n789", "OOO\nXX6\n789\nYou lose."]
    assert [(trajectory.reward, trajectory.success, trajectory.status) for trajectory in (cross, nought)] == [
        (1.0, True, Status.COMPLETED),
        (0.0, False, Status.COMPLETED),
    ]
    assert (cross.info["agent"], nought.info["agent"]) == ("X", "O")
    assert cross.num_trained_tokens == 6 and nought.num_trained_tokens == 4


def test_a_reward_of_each_seat_looks_into_the_finished_game(renderer: Renderer) -> None:
    def reward(task: Task, environment: TicTacToe) -> float:
        return environment.over + 0.5 * task.seed

    async def run() -> list[Trajectory]:
        async with open_rewards(RewardConfig(), reward) as rewards:
            sampler = SelfPlaySampler(rewards.loop(scripted(renderer, lambda seat, _, turn: X_WINS[seat][turn])))
            try:
                return await asyncio.wait_for(sampler.run(games(2)), 20)
            finally:
                sampler.close()

    assert [played.reward for played in asyncio.run(run())] == [1.5] * 4


def test_each_turn_is_a_row_that_shows_the_board_alone(renderer: Renderer) -> None:
    cross, _ = play(scripted(renderer, lambda seat, _, turn: X_WINS[seat][turn]))
    boards = [row.messages[-1].content for row in cross.rows if row.messages]
    assert boards == ["123\n456\n789", "X23\nO56\n789", "XX3\nOO6\n789"]


def test_a_draw_pays_both_a_half(renderer: Renderer) -> None:
    played = play(scripted(renderer, lambda seat, _, turn: DRAWN[seat][turn]))
    assert [(trajectory.reward, trajectory.success, trajectory.metrics["draw"]) for trajectory in played] == [
        (0.5, False, 1.0)
    ] * 2


@pytest.mark.parametrize("concurrency", [2, 3, 5, 64])
def test_many_games_at_once_stay_apart(renderer: Renderer, concurrency: int) -> None:
    def script(seat: str, game: int, turn: int) -> str:
        return (X_WINS if game % 2 else DRAWN)[seat][turn]

    played = play(scripted(renderer, script), 9, concurrency=concurrency)
    assert [trajectory.member for trajectory in played] == [game for game in range(9) for _ in "XO"]
    assert [trajectory.reward for trajectory in played] == [
        paid for game in range(9) for paid in ((1, 0) if game % 2 else (0.5, 0.5))
    ]


def test_an_engine_error_of_one_seat_ends_the_game_of_the_other_without_a_reward(renderer: Renderer) -> None:
    def script(seat: str, game: int, turn: int) -> str | ScriptedReply:
        return ScriptedReply(fault="raise") if (seat, turn) == ("O", 1) else X_WINS[seat][turn]

    cross, nought = play(scripted(renderer, script))
    assert (nought.status, nought.reward) == (Status.ENGINE_ERROR, None)
    assert (cross.status, cross.stop_reason, cross.reward) == (Status.CANCELLED, StopReason.CANCELLED, None)
    assert "the game ended when O ended as engine_error" in str(cross.error)


def test_a_seat_that_fails_before_the_other_one_moved(renderer: Renderer) -> None:
    cross, nought = play(scripted(renderer, lambda *_: ScriptedReply(fault="raise")))
    assert (cross.status, nought.status) == (Status.ENGINE_ERROR, Status.CANCELLED)
    assert nought.turns == ()


def test_a_seat_that_runs_out_of_a_budget_forfeits(renderer: Renderer) -> None:
    def script(seat: str, game: int, turn: int) -> str:
        return "a very long reply" if (seat, turn) == ("O", 1) else X_WINS[seat][turn]

    cross, nought = play(scripted(renderer, script))
    assert (nought.status, nought.reward) == (Status.TRUNCATED, 0.0)
    assert (cross.status, cross.reward, cross.success) == (Status.COMPLETED, 1.0, True)


def test_a_fault_of_the_game_is_that_of_the_seat_that_moved(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(TicTacToe):
        def on_message(self, text: str) -> str:
            raise ZeroDivisionError("a bug")

    async def run() -> list[Trajectory]:
        loop = scripted(renderer, lambda seat, _, turn: X_WINS[seat][turn])
        sampler = SelfPlaySampler(loop, lambda task: Broken(opponent="self"), SamplerConfig(max_failure_rate=1.0))
        return await asyncio.wait_for(sampler.run(games(1)), 20)

    cross, nought = asyncio.run(run())
    assert (cross.status, nought.status) == (Status.ENV_ERROR, Status.CANCELLED)
    assert "ZeroDivisionError: a bug" in str(cross.error)


def test_a_game_that_cannot_be_made_is_the_failure_of_one_seat(renderer: Renderer) -> None:
    def make(task: Task) -> TicTacToe:
        raise OSError("no board")

    async def run() -> list[Trajectory]:
        loop = scripted(renderer, lambda seat, _, turn: X_WINS[seat][turn])
        sampler = SelfPlaySampler(loop, make, SamplerConfig(max_failure_rate=0.5))
        return await asyncio.wait_for(sampler.run(games(3)), 20)

    played = asyncio.run(run())
    assert [trajectory.status for trajectory in played] == [Status.ENV_ERROR, Status.CANCELLED] * 3
    assert {trajectory.error for trajectory in played[1::2]} == {"there is no game: OSError: no board"}


def test_a_failure_counts_once_a_game(renderer: Renderer) -> None:
    async def run() -> None:
        loop = scripted(renderer, lambda *_: ScriptedReply(fault="raise"))
        sampler = SelfPlaySampler(loop, config=SamplerConfig(max_failure_rate=0.4))
        await asyncio.wait_for(sampler.run(games(3)), 20)

    with pytest.raises(TrainingHalted, match="3 of 6 episodes failed"):
        asyncio.run(run())


def test_a_rival_plays_the_other_seat_and_leaves_no_trajectory(renderer: Renderer) -> None:
    async def run() -> list[Trajectory]:
        loop = scripted(renderer, lambda seat, _, turn: X_WINS["X"][turn])
        rival = scripted(renderer, lambda seat, _, turn: X_WINS["O"][turn])
        sampler = SelfPlaySampler(loop, rival=rival)
        return await asyncio.wait_for(sampler.run(games(4, seats=("X",))), 20)

    played = asyncio.run(run())
    assert [trajectory.group for trajectory in played] == ["0/0:X"] * 4
    assert [[turn.message.content for turn in trajectory.turns] for trajectory in played] == [["1", "2", "3"]] * 4


def test_a_rival_that_fails_is_a_failure_of_the_episode(renderer: Renderer) -> None:
    async def run() -> list[Trajectory]:
        loop = scripted(renderer, lambda seat, _, turn: X_WINS["X"][turn])
        rival = scripted(renderer, lambda *_: ScriptedReply(fault="raise"))
        sampler = SelfPlaySampler(loop, config=SamplerConfig(max_failure_rate=1.0), rival=rival)
        return await asyncio.wait_for(sampler.run(games(1, seats=("X",))), 20)

    (cross,) = asyncio.run(run())
    assert cross.status is Status.ENGINE_ERROR
    assert str(cross.error).startswith("the rival O ended as engine_error")


def test_an_environment_without_such_seats_is_refused(renderer: Renderer) -> None:
    async def run() -> None:
        sampler = SelfPlaySampler(scripted(renderer, lambda *_: "1"))
        await sampler.run([Episode(Task("TicTacToe-v0", 1), group_of("0/0", "X"), seat="X")])

    with pytest.raises(ConfigError, match="TicTacToe-v0 has no seat 'X' that a rollout plays"):
        asyncio.run(run())


def test_a_game_whose_moves_are_no_short_computation_is_refused(renderer: Renderer) -> None:
    class Slow(TicTacToe):
        runs_inline = False

    async def run() -> None:
        sampler = SelfPlaySampler(scripted(renderer, lambda *_: "1"), lambda task: Slow(opponent="self"))
        await sampler.run(games(1))

    with pytest.raises(ConfigError, match="Slow has runs_inline = False"):
        asyncio.run(run())
