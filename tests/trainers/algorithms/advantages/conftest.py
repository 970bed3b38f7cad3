"""Random batches with everything that any estimator asks for, and the same batches as plain lists."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from agentgym.trainers.algorithms.advantages import ADVANTAGES, Credit

PER_TOKEN = ("values_BT", "turns_BT", "states_BT", "proxy_BT", "components_BTK")
NUM_COMPONENTS = 3


@dataclass(frozen=True, eq=False)
class Batch:
    """The vocabulary of tensors; every estimator takes what it names."""

    rewards_BT: Tensor
    mask_BT: Tensor
    groups_B: Tensor
    further: dict[str, Tensor]

    def estimate(self, name: str, **settings: object) -> Credit:
        estimator = ADVANTAGES[name]
        parameters = inspect.signature(estimator).parameters
        further = {key: tensor for key, tensor in self.further.items() if key in parameters}
        return estimator(self.rewards_BT, self.mask_BT, self.groups_B, **further, **settings)

    def take(self, rows: Sequence[int]) -> Batch:
        order = torch.tensor(rows, dtype=torch.int64)
        further = {key: tensor[order] for key, tensor in self.further.items()}
        return Batch(self.rewards_BT[order], self.mask_BT[order], self.groups_B[order], further)

    def to(self, dtype: torch.dtype) -> Batch:
        further = {k: t.to(dtype) if t.is_floating_point() else t for k, t in self.further.items()}
        return replace(self, rewards_BT=self.rewards_BT.to(dtype), further=further)


@dataclass
class Episode:
    """A row as lists that hold one entry for each trained token, with the rewards where they count."""

    group: int
    score: float
    places: list[int]
    rewards: list[float]
    values: list[float]
    turns: list[int]
    states: list[int]
    proxy: list[float]
    bootstrap: float
    greedy: float
    components: list[float]
    to_go: list[float] = field(default_factory=list)

    @property
    def spans(self) -> list[list[int]]:
        """Indices of the trained tokens of each turn."""
        spans: list[list[int]] = []
        for index, turn in enumerate(self.turns):
            if index == 0 or turn != self.turns[index - 1]:
                spans.append([])
            spans[-1].append(index)
        return spans

    def turn_returns(self, gamma: float) -> list[float]:
        rewards = [sum(self.rewards[index] for index in span) for span in self.spans]
        return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def random_batch(
    seed: int, *, positive: bool = False, trained: float | None = None, sizes: Sequence[int] = (3, 2, 4)
) -> Batch:
    """Groups of the given sizes in any order, 11 tokens, holes, rewards everywhere; `positive`: none below 0.

    `trained` is the share of tokens that are; left out, every other seed has so few that some rows have none.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = [group for group, size in zip((7, -2, 40, 3), sizes, strict=False) for _ in range(size)]
    groups_B = torch.tensor(groups)[torch.randperm(len(groups), generator=generator)]
    shape = (len(groups), 11)

    def normal(*extra: int) -> Tensor:
        return torch.randn(*shape, *extra, generator=generator, dtype=torch.float64)

    share = (0.6, 0.25)[seed % 2] if trained is None else trained
    mask_BT = torch.rand(shape, generator=generator) < share
    turns_BT = (torch.rand(shape, generator=generator) < 0.4).to(torch.int64).cumsum(-1)
    state_of_turn = torch.randint(-1, 3, (len(groups), 12), generator=generator)
    rewards_BT = normal() * (torch.rand(shape, generator=generator) < 0.5)
    further = {
        "values_BT": normal(),
        "bootstrap_B": normal()[:, 0],
        "turns_BT": torch.where(mask_BT | (torch.rand(shape, generator=generator) < 0.5), turns_BT, -1),
        "states_BT": state_of_turn.gather(1, turns_BT),
        "greedy_B": normal()[:, 0],
        "components_BTK": normal(NUM_COMPONENTS),
        "proxy_BT": torch.rand(shape, generator=generator, dtype=torch.float64) * 2,
    }
    return Batch(rewards_BT.abs() if positive else rewards_BT, mask_BT, groups_B, further)


def as_episodes(batch: Batch) -> list[Episode]:
    """The batch by plain loops."""
    lists = {key: tensor.tolist() for key, tensor in batch.further.items()}
    episodes = []
    for row, (rewards, mask) in enumerate(zip(batch.rewards_BT.tolist(), batch.mask_BT.tolist(), strict=True)):
        places = [place for place, trained in enumerate(mask) if trained]
        carried = dict.fromkeys(places, 0.0)
        for place, reward in enumerate(rewards):
            before = [earlier for earlier in places if earlier <= place]
            if places:
                carried[before[-1] if before else places[0]] += reward
        counted = [carried[place] for place in places]
        episodes.append(
            Episode(
                group=int(batch.groups_B[row]),
                score=sum(rewards),
                places=places,
                rewards=counted,
                values=[lists["values_BT"][row][place] for place in places],
                turns=[lists["turns_BT"][row][place] for place in places],
                states=[lists["states_BT"][row][place] for place in places],
                proxy=[lists["proxy_BT"][row][place] for place in places],
                bootstrap=lists["bootstrap_B"][row],
                greedy=lists["greedy_B"][row],
                components=[sum(token[k] for token in lists["components_BTK"][row]) for k in range(NUM_COMPONENTS)],
                to_go=[sum(counted[index:]) for index in range(len(counted))],
            )
        )
    return episodes


def expect(credit: Credit, batch: Batch, advantages: list[list[float]], returns: list[list[float]]) -> None:
    """Holds a result against lists with one number for each trained token."""
    for actual_BT, expected in zip(credit, (advantages, returns), strict=True):
        full = torch.zeros_like(batch.rewards_BT)
        for row, (episode, numbers) in enumerate(zip(as_episodes(batch), expected, strict=True)):
            full[row, episode.places] = torch.tensor(numbers, dtype=full.dtype)
        torch.testing.assert_close(actual_BT, full, rtol=1e-10, atol=1e-10)
        assert not actual_BT[~batch.mask_BT].any()


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """`make_batch(seed, positive=, trained=, sizes=)`: see `random_batch`."""
    return random_batch


@pytest.fixture
def episodes_of() -> Callable[[Batch], list[Episode]]:
    return as_episodes


@pytest.fixture
def check_credit() -> Callable[..., None]:
    return expect
