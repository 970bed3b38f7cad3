"""Draws follow the distribution whose logprobs they report, and depend on their own row and seed alone."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import RepetitionPenaltyLogitsProcessor

from agentgym.engines.local.sampling import draw, penalize, uniforms
from agentgym.engines.protocol import Sampling
from agentgym.errors import ConfigError
from agentgym.rollout.limits import SamplingConfig

LOGITS_V = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def frequencies(
    temperature: float, top_k: int, top_p: float, min_p: float = 0.0, count: int = 40_000
) -> tuple[torch.Tensor, torch.Tensor]:
    id_B, logp_B = draw(
        LOGITS_V.expand(count, -1),
        uniforms(7, count),
        np.full(count, temperature, np.float32),
        np.full(count, top_k),
        np.full(count, top_p, np.float32),
        np.full(count, min_p, np.float32),
    )
    probability_V = torch.zeros(5).index_copy_(0, id_B, logp_B.exp())
    return torch.bincount(id_B, minlength=5) / count, probability_V


def test_draws_have_the_frequencies_they_report_under_all_settings() -> None:
    cases = (
        *((1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.0, 0, 0.7, 0.0), (2.0, 4, 0.8, 0.0)),
        *((1.0, 0, 1.0, 0.2), (0.7, 4, 0.9, 0.1)),
    )
    for temperature, top_k, top_p, min_p in cases:
        frequency_V, probability_V = frequencies(temperature, top_k, top_p, min_p)
        assert torch.allclose(frequency_V, probability_V, atol=0.01)
        assert abs(float(probability_V.sum()) - 1) < 1e-5


def test_top_k_and_top_p_keep_the_smallest_sufficient_set() -> None:
    p_V = LOGITS_V.softmax(-1)  # in descending order: ids 3, 0, 4, 1, 2
    assert frequencies(1.0, 2, 1.0)[0].nonzero()[:, 0].tolist() == [0, 3]
    assert frequencies(1.0, 0, float(p_V[3]) - 1e-3)[0].nonzero()[:, 0].tolist() == [3]
    assert frequencies(1.0, 0, float(p_V[3] + p_V[0]) + 1e-3)[0].nonzero()[:, 0].tolist() == [0, 3, 4]


def test_min_p_keeps_what_is_probable_enough_beside_the_most_probable_id() -> None:
    share_V = LOGITS_V.softmax(-1) / LOGITS_V.softmax(-1).max()
    for id_ in (0, 4):
        sampled_ids = frequencies(1.0, 0, 1.0, float(share_V[id_]) - 1e-3)[0].nonzero()[:, 0].tolist()
        assert sampled_ids == [index for index in range(5) if share_V[index] >= share_V[id_]]
    assert frequencies(1.0, 0, 1.0, 1.0)[0].nonzero()[:, 0].tolist() == [3]


def test_penalties_are_those_of_transformers_and_of_openai() -> None:
    prompt, reply = [4, 1, 1], [3, 0, 3]
    ids_T = np.array([*prompt, *reply])
    logits_V = LOGITS_V.clone()
    penalize(logits_V, ids_T, 3, Sampling(max_tokens=1, repetition_penalty=1.3))
    theirs = RepetitionPenaltyLogitsProcessor(penalty=1.3)
    assert torch.allclose(logits_V, theirs(torch.tensor(ids_T)[None], LOGITS_V[None].clone())[0])
    logits_V = LOGITS_V.clone()
    penalize(logits_V, ids_T, 3, Sampling(max_tokens=1, presence_penalty=0.5, frequency_penalty=0.25))
    assert torch.allclose(logits_V, LOGITS_V - torch.tensor([0.75, 0.0, 0.0, 1.0, 0.0]))
    penalize(logits_V, ids_T[:3], 3, Sampling(max_tokens=1, presence_penalty=2.0))  # nothing was said yet
    assert torch.allclose(logits_V, LOGITS_V - torch.tensor([0.75, 0.0, 0.0, 1.0, 0.0]))


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 0.0}, {"presence_penalty": 2.5}, {"frequency_penalty": -3.0}]
)
def test_a_penalty_that_servers_do_not_have_is_refused(penalty: dict[str, float]) -> None:
    for kind in (partial(Sampling, max_tokens=1), SamplingConfig):
        with pytest.raises(ConfigError, match=next(iter(penalty))):
            kind(**penalty)  # type: ignore[operator]


def test_temperature_0_is_greedy_and_reports_the_logprob_at_temperature_1() -> None:
    id_B, logp_B = draw(LOGITS_V[None], floats(0.99), floats(0), np.array([1]), floats(0.1), floats(0.5))
    assert id_B.tolist() == [3]
    assert torch.allclose(logp_B, LOGITS_V.log_softmax(-1)[3:4])


def test_an_id_of_probability_zero_is_never_drawn() -> None:
    logits_BV = torch.full((1, 6), -torch.inf)
    logits_BV[0, 2] = 0.0
    for uniform in (0.0, 0.5, float(np.nextafter(np.float32(1), np.float32(0)))):
        id_B, logp_B = draw(logits_BV, floats(uniform), floats(1), np.array([0]), floats(1), floats(0))
        assert (id_B.tolist(), logp_B.tolist()) == ([2], [0.0])


@settings(deadline=None)
@given(st.integers(-(2**70), 2**70), st.integers(1, 50))
def test_a_longer_reply_begins_with_the_numbers_of_a_shorter_one(seed: int, count: int) -> None:
    long_T = uniforms(seed, 60)
    assert (long_T[:count] == uniforms(seed, count)).all()
    assert ((long_T >= 0) & (long_T < 1)).all()


def test_neighbouring_seeds_and_tokens_are_uncorrelated() -> None:
    grid = np.stack([uniforms(seed, 200) for seed in range(200)]).astype(np.float64)
    assert abs(grid.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[1:, :-1].ravel(), grid[:-1, 1:].ravel())[0, 1]) < 0.02
