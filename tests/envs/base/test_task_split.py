"""Held-out tasks are held out by what they are: no task is on both sides, and a reset is decided by its seed alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentgym.envs import EVAL_SEED_START, ToolEnv, make_env
from agentgym.envs.base.task_split import MAX_DRAWS, SAME_DRAWS, digest_of, is_held_out
from agentgym.errors import EnvironmentFault
from agentgym.testing.contracts.env import examine_env
from agentgym.trainers.tasks.source import EnvTasks
from agentgym.types import JSON

SMALL = "Countdown-v0 Sokoban-v0 Mastermind-v0 Wordle-v0 WordLadder-v0 GuessNumber-v0 Negotiation-v0".split()


class Shown(ToolEnv):
    """A game whose prompt shows the task: one of `size`."""

    size = 40
    system_prompt = "Say the number."
    max_turns = 2
    runs_inline = True
    starts = 0

    def start(self, options: dict[str, Any]) -> str:
        self.starts += 1
        self.number = int(options.get("number", self.np_random.integers(self.size)))
        return f"The number is {self.number}."


class Hidden(Shown):
    """A game whose prompt shows nothing of the task."""

    def start(self, options: dict[str, Any]) -> str:
        super().start(options)
        return "Guess."


class Declared(Hidden):
    """The same, with what its tasks are."""

    def task_identity(self) -> JSON:
        return self.number


class Single(Shown):
    """A game of one task."""

    size = 1


def digests(env: Any, seeds: range) -> list[str]:
    return [env.task_digest for seed in seeds if env.reset(seed=seed)]


@pytest.mark.parametrize("env_id", SMALL)
def test_no_held_out_task_is_one_of_training(env_id: str) -> None:
    env = make_env(env_id)
    source = EnvTasks(env_id, 0)
    sides = []
    for tasks in (
        [task for step in range(1, 21) for task in source.train_tasks(step, range(16))],
        source.eval_tasks(100),
    ):
        sides.append({env.task_digest for task in tasks if env.reset(seed=task.seed)})
        assert not env.split_failed
    assert not sides[0] & sides[1]
    assert not any(map(is_held_out, sides[0])) and all(map(is_held_out, sides[1]))


@pytest.mark.parametrize("env_id", ["Countdown-v0", "Sokoban-v0"])
def test_nearly_all_of_two_hundred_held_out_tasks_are_distinct(env_id: str) -> None:
    identities = digests(make_env(env_id), range(EVAL_SEED_START, EVAL_SEED_START + 200))
    assert len(set(identities)) >= 195


@pytest.mark.parametrize("kind", [Shown, Declared])
def test_the_prompt_or_what_is_declared_tells_tasks_apart(kind: type[Shown]) -> None:
    env = kind()
    training, held_out = digests(env, range(200)), digests(env, range(EVAL_SEED_START, EVAL_SEED_START + 200))
    assert not set(training) & set(held_out)
    assert len(set(training) | set(held_out)) == Shown.size


def test_a_seed_whose_first_draw_is_on_its_side_gives_that_draw() -> None:
    env, alone = Shown(), Shown()
    alone.own_split = True
    for seed in range(60):
        first, _ = alone.reset(seed=seed)
        drawn, _ = env.reset(seed=seed)
        assert (first == drawn) == (not is_held_out(alone.task_digest))


def test_equal_seeds_give_equal_tasks_in_any_order_sync_and_async() -> None:
    seeds = [*range(20), *range(EVAL_SEED_START, EVAL_SEED_START + 20)]
    env = Declared()
    forwards = {seed: env.reset(seed=seed) and env.number for seed in seeds}
    backwards = {seed: env.reset(seed=seed) and env.number for seed in reversed(seeds)}
    fresh = {}
    for seed in seeds:
        new_env = Declared()
        asyncio.run(new_env.areset(seed=seed))
        fresh[seed] = new_env.number
    assert forwards == backwards == fresh


def test_a_reset_without_a_seed_stays_on_the_side_of_the_one_before() -> None:
    env = Shown()
    for seed, side in ((3, False), (EVAL_SEED_START, True)):
        env.reset(seed=seed)
        for _ in range(20):
            env.reset()
            assert is_held_out(env.task_digest) == side


def test_options_name_the_task_and_are_never_drawn_again() -> None:
    env = Shown()
    for number in range(20):
        for seed in (0, EVAL_SEED_START):
            assert env.reset(seed=seed, options={"number": number})[0] == f"The number is {number}."
    assert env.starts == 40


@pytest.mark.parametrize("kind", [Hidden, Single])
def test_tasks_that_look_the_same_are_those_of_their_seeds_and_said_to_be_on_no_side(kind: type[Shown]) -> None:
    env, alone = kind(), kind()
    alone.own_split = True
    for seed in (0, EVAL_SEED_START):
        env.reset(seed=seed)
        alone.reset(seed=seed)
        assert env.number == alone.number
        assert env.split_failed == (is_held_out(env.task_digest) != (seed == EVAL_SEED_START))
    assert env.starts <= 2 + SAME_DRAWS < MAX_DRAWS


def test_an_identity_that_is_no_json_is_refused() -> None:
    class Odd(Shown):
        def task_identity(self) -> Any:
            return {1, 2}

    with pytest.raises(EnvironmentFault, match=r"task_identity\(\) returns JSON"):
        Odd().reset(seed=0)


@pytest.mark.long
def test_env_check_counts_tasks_and_warns_where_held_out_ones_are_trained_on() -> None:
    def seen(kind: type[Shown]) -> str:
        (verdict,) = examine_env(kind, only=("held-out tasks",))
        return f"{verdict.verdict}: {verdict.not_claimed}{''.join(finding.message for finding in verdict.findings)}"

    assert "task_identity() says what distinguishes tasks" in seen(Single)
    assert "task_identity() says what distinguishes tasks" in seen(Hidden)
    assert "of the held-out ones are distinct" in seen(Declared)
    trained = [number for number in range(20) if not is_held_out(digest_of(number, {}))][:2]

    class Two(Hidden):
        def task_identity(self) -> JSON:
            return trained[self.number % 2]

    assert seen(Two).startswith("warned: 200 held-out and")
    assert "200 of the held-out ones are training tasks" in seen(Two)
