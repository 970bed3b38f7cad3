"""Weights and state that ranks store and write themselves, without a cluster."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from agentgym.embedded import embedded_folder
from agentgym.engines.weights.buckets import fused_digests
from agentgym.model.model_folder import load_decoder, published_views
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.checkpoints.sharded_state import finish_state
from agentgym.trainers.cluster.rank_actor import RankActor
from agentgym.trainers.cluster.rank_process import CopyTarget
from agentgym.trainers.cluster.weight_store import read_weights, store_weights, write_weights
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.parts.parts import LearnerLost

Begin = Callable[[TrainConfig, Path], RankActor]


@pytest.mark.usefixtures("parcels_here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_writes_what_it_copied_and_a_new_one_goes_on_with_it(
    dtype: str, small_run: TrainConfig, begin_rank: Begin, fresh_batch: Callable[..., TrainingBatch], tmp_path: Path
) -> None:
    config = replace(small_run, learner=replace(small_run.learner, dtype=dtype))
    rank = begin_rank(config, embedded_folder())
    model = rank._learner.model
    batch = fresh_batch(model)
    rank.act_on(Learner.update, batch)
    rank.copy_state(0)
    copied = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(LearnerLost, match="a rank was restarted"):
        rank.results_of(1)
    rank.act_on(Learner.update, batch)
    rank.write_copy(0, CopyTarget(folder=str(tmp_path), part="learner", marker="", config=model.to_hf()))
    while (results := rank.results_of(0)) is None:
        time.sleep(0.01)
    finish_state(tmp_path / "learner", *rank.end_copy(0), [results])
    written = load_decoder(tmp_path, dtype=getattr(torch, dtype))
    assert all(torch.equal(left, right) for left, right in zip(written.parameters(), copied, strict=True))
    second_rank = begin_rank(config, tmp_path)
    second_rank.load_state([str(tmp_path / "learner")])
    assert second_rank.num_steps() == 1
    second_rank.act_on(Learner.update, batch)
    for left, right in zip(second_rank._learner.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.usefixtures("parcels_here")
def test_weights_are_stored_in_buckets_of_layers_and_written_for_transformers(tmp_path: Path) -> None:
    model = load_decoder(embedded_folder())
    views = dict(published_views(model.to(torch.bfloat16)))
    views["model.norm.weight"] = views["model.norm.weight"].float()  # types may differ
    shipment = store_weights(views.items(), max_bytes=1)
    assert len(shipment.buckets) == model.num_layers + 2
    assert shipment.digests == fused_digests(views)
    weights = asyncio.run(read_weights(shipment))
    assert weights.keys() == views.keys()
    for name, tensor in views.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name], tensor)
    write_weights(shipment, model.to_hf(), tmp_path)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) == math.ceil(len(shipment.buckets) / 4) > 1
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, tensor in views.items():
        assert torch.equal(theirs[name], tensor.float())


@pytest.mark.usefixtures("parcels_here")
def test_engines_get_weights_in_their_type_and_checkpoints_the_trained_ones(
    small_run: TrainConfig, begin_rank: Begin, fresh_batch: Callable[..., TrainingBatch]
) -> None:
    rank = begin_rank(small_run, embedded_folder())
    rank.act_on(Learner.update, fresh_batch(rank._learner.model))
    trained = dict(published_views(rank._learner.model))
    shipment = rank.ship("bfloat16")
    assert shipment is not None
    for name, tensor in asyncio.run(read_weights(shipment)).items():
        assert torch.equal(tensor, trained[name].bfloat16())
    rank.copy_state(0)
    copy_shipment = rank._copies[0].shipment
    assert copy_shipment is not None
    for name, tensor in asyncio.run(read_weights(copy_shipment)).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, trained[name])
    shipment = rank.ship("float32")
    rank.copy_state(1)
    assert rank._copies[1].shipment is shipment, "they are stored once if the types are the same"
