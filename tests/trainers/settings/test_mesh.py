"""What can be split over ranks, and how many shares are left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder
from agentgym.trainers.learner.learner import Learner, LearnerConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.mesh import MeshConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig


def test_ranks_that_share_passes_take_rows_together() -> None:
    assert [MeshConfig(sequence=2, tensor=2).data(number) for number in (4, 8, 12)] == [1, 2, 3]
    assert MeshConfig().data(3) == 3


@pytest.mark.parametrize(
    ("mesh", "num_ranks", "message"),
    [
        (MeshConfig(sequence=3), 3, "4 query heads cannot be split into 3 equal parts"),
        (MeshConfig(sequence=4, tensor=2), 8, "4 query heads cannot be split into 8"),
        (MeshConfig(tensor=4), 4, "2 key/value heads cannot be split into 4"),
        (MeshConfig(tensor=2), 6, "32 numbers of a state cannot be split into 3 equal parts, as the shards"),
    ],
)
def test_a_model_is_split_where_it_has_whole_heads(
    mesh: MeshConfig, num_ranks: int, message: str, tiny: Callable[..., Decoder]
) -> None:
    config = tiny(qkv_bias=True).config
    with pytest.raises(ConfigError, match=message):
        mesh.check(config, num_ranks)
    MeshConfig(sequence=2, tensor=2).check(config, 8)  # four query heads, and two key/value heads
    MeshConfig(sequence=4).check(config, 12)
    with pytest.raises(ConfigError, match="48 biases cannot be split into 64"):
        MeshConfig(tensor=2).check(replace(config, head_width=6), 64)


def test_experts_are_divided_on_ranks_with_passes_of_their_own(tiny: Callable[..., Decoder]) -> None:
    assert MeshConfig(expert=2).data(4) == 4, "each rank takes rows of its own"
    with pytest.raises(ConfigError, match=r"3 learner ranks are no multiple of learner\.mesh\.expert 2"):
        MeshConfig(expert=2).data(3)
    with pytest.raises(ConfigError, match=r"leave learner\.mesh\.sequence and learner\.mesh\.tensor out"):
        MeshConfig(expert=2, sequence=2)
    with pytest.raises(ConfigError, match=r"and this model has none: leave it out"):
        MeshConfig(expert=2).check(tiny().config, 2)


@pytest.mark.parametrize("name", ["sequence", "tensor", "expert"])
def test_there_is_no_half_rank(name: str) -> None:
    with pytest.raises(ConfigError, match=f"learner.mesh.{name} is at least 1, got 0"):
        MeshConfig(**{name: 0})


def test_one_process_shares_its_passes_with_nobody(tiny: Callable[..., Decoder]) -> None:
    for mesh in (MeshConfig(tensor=2), MeshConfig(expert=2)):
        with pytest.raises(ConfigError, match="is for a learner of several ranks"):
            Learner(tiny(), LearnerConfig(mesh=mesh), OptimizerConfig(), total_steps=1)


def test_adapters_are_not_split_by_heads() -> None:
    with pytest.raises(ConfigError, match=r"learner.lora is not split by learner\.mesh\.tensor"):
        LearnerConfig(lora=LoraConfig(rank=4), mesh=MeshConfig(tensor=2))
