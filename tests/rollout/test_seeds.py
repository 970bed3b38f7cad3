"""Seeds depend on the whole path and on nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.seeds import derive
from agentgym.types import Task

paths = st.lists(st.integers() | st.text(), max_size=4)


@given(st.integers(), paths, st.integers(), paths)
def test_unequal_paths_give_unequal_63_bit_seeds(
    run: int, path: list[int | str], other_run: int, other_path: list[int | str]
) -> None:
    seed = derive(run, *path)
    assert 0 <= seed < 2**63
    assert (seed == derive(other_run, *other_path)) == ((run, path) == (other_run, other_path))


def test_a_seed_is_the_same_in_every_process() -> None:
    assert derive(0, 1, "a", 2) == 6525679312765028001


def test_members_turns_and_resumptions_differ_and_the_phase_does_not() -> None:
    episode = Episode(Task("X-v0", 1), "0/1", 2, run_seed=3, step=4)
    evaluated = Episode(Task("X-v0", 1), "0/1", 2, run_seed=3, step=4, phase="eval")
    second_member = Episode(Task("X-v0", 1), "0/1", 3, run_seed=3, step=4)
    seeds = {episode.seed(0), episode.seed(1), episode.seed(0, part=1), second_member.seed(0)}
    assert len(seeds) == 4
    assert evaluated.seed(0) == episode.seed(0)
    assert evaluated.session != episode.session
