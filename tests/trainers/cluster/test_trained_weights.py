"""Weights and state that ranks store and write themselves, without a cluster."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

pytest.importorskip("ray", reason="Ray is not installed: pip install 'agentgym-llm[ray]'")

from agentgym.embedded import embedded_folder
from agentgym.engines.weights.buckets import fused_digests
from agentgym.model.model_folder import load_decoder, published_views
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.checkpoints.sharded_state import finish_state
from agentgym.trainers.cluster import weight_store
from agentgym.trainers.cluster.rank_actor import RankActor
from agentgym.trainers.cluster.rank_process import CopyTarget
from agentgym.trainers.cluster.shipment import Shipment
from agentgym.trainers.cluster.weight_store import HeldWeights, read_weights, store_weights, write_weights
from agentgym.trainers.config import TrainConfig
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
    rank.act_on(batch, "update", {})
    rank.copy_state(0)
    copied = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(LearnerLost, match="a rank was restarted"):
        rank.results_of(1)
    rank.act_on(batch, "update", {})
    rank.write_copy(0, CopyTarget(folder=str(tmp_path), part="learner", marker="", config=model.to_hf()))
    while (results := rank.results_of(0)) is None:
        time.sleep(0.01)
    finish_state(tmp_path / "learner", *rank.end_copy(0), [results])
    written = load_decoder(tmp_path, dtype=getattr(torch, dtype))
    assert all(torch.equal(one, two) for one, two in zip(written.parameters(), copied, strict=True))
    other = begin_rank(config, tmp_path)
    other.load_state([str(tmp_path / "learner")])
    assert other.num_steps() == 1
    other.act_on(batch, "update", {})
    for one, two in zip(other._learner.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.usefixtures("parcels_here")
def test_weights_are_stored_in_buckets_of_whole_layers_and_written_as_transformers_does(tmp_path: Path) -> None:
    model = load_decoder(embedded_folder())
    views = dict(published_views(model.to(torch.bfloat16)))
    views["model.norm.weight"] = views["model.norm.weight"].float()  # types may differ
    shipment = store_weights(views.items(), max_bytes=1)
    assert len(shipment.buckets) == model.num_layers + 2
    assert shipment.digests == fused_digests(views)
    found = asyncio.run(read_weights(shipment))
    assert found.keys() == views.keys()
    for name, tensor in views.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    write_weights(shipment, model.to_hf(), tmp_path)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) == math.ceil(len(shipment.buckets) / 4) > 1
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, tensor in views.items():
        assert torch.equal(theirs[name], tensor.float())


def changed(weights: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Weights of which this share of the elements has another sign."""
    return {name: torch.where(torch.rand(tensor.shape) < share, -tensor, tensor) for name, tensor in weights.items()}


@pytest.mark.usefixtures("parcels_here")
def test_an_engine_on_another_node_fetches_what_a_step_changed_and_has_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    first = {name: view.bfloat16() for name, view in published_views(load_decoder(embedded_folder()))}
    first["model.norm.weight"] = first["model.norm.weight"].float()  # types may differ
    whole = sum(tensor.nbytes for tensor in first.values())
    versions = [first]
    for share in (0.01, 0.0, 0.02, 0.9, 0.01):
        versions.append(changed(versions[-1], share))
    shipments: list[Shipment] = []
    for weights in versions:
        before = shipments[-1] if shipments else None
        shipments.append(store_weights(weights.items(), 2**18, has_deltas=True, before=before))

    async def take(held: HeldWeights, version: int) -> int | None:
        weights, fetched = await held.take(shipments[version])
        assert weights.keys() == first.keys()
        for name, tensor in versions[version].items():
            assert weights[name].dtype == tensor.dtype
            assert torch.equal(weights[name], tensor)
        return fetched

    held = HeldWeights()
    assert asyncio.run(take(held, 0)) is None  # it is on the node of the rank, and reads them there
    monkeypatch.setattr(weight_store, "own_node", lambda: "elsewhere")
    fetched = [asyncio.run(take(held, version)) or 0 for version in range(6)]
    assert fetched[0] >= whole and fetched[4] >= whole  # the first, and one that changed nearly everything
    assert fetched[2] == 0
    for version, share in ((1, 0.01), (3, 0.02), (5, 0.01)):
        assert 0 < fetched[version] < 4 * share * whole  # six bytes for each element of two
    late = HeldWeights()
    for version in (0, 2, 3):
        fetched = [asyncio.run(take(late, version)) or 0]
    assert fetched[0] < 0.1 * whole
    late._packed[1][7] ^= 1  # a bit flips in this node's memory, and the changes give other weights than the rank's
    assert (asyncio.run(take(late, 4)) or 0) >= whole
    assert not caplog.messages, "nearly all of it was sent anew, and with it that bit"
    late._packed[1][7] ^= 1
    assert (asyncio.run(take(late, 5)) or 0) >= whole
    assert "all of them are fetched" in caplog.text


@pytest.mark.usefixtures("parcels_here")
@pytest.mark.parametrize(("step", "share"), [(1e-6, 0.07), (1e-5, 0.43)])
def test_a_usual_step_of_weights_in_bfloat16_is_a_part_of_their_bytes(
    step: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(512, 2048) * 0.02
    moved = weight + torch.empty_like(weight).uniform_(-step, step)
    before = store_weights([("w", weight.bfloat16())], has_deltas=True)
    after = store_weights([("w", moved.bfloat16())], has_deltas=True, before=before)
    monkeypatch.setattr(weight_store, "own_node", lambda: "elsewhere")
    held = HeldWeights()
    (_, whole), (_, fetched) = (asyncio.run(held.take(shipment)) for shipment in (before, after))
    assert whole == 2 * weight.numel()
    assert fetched == pytest.approx(share * whole, rel=0.05)


@pytest.mark.usefixtures("parcels_here")
def test_engines_are_sent_weights_in_their_own_type_and_a_checkpoint_has_those_that_are_trained(
    small_run: TrainConfig, begin_rank: Begin, fresh_batch: Callable[..., TrainingBatch]
) -> None:
    rank = begin_rank(small_run, embedded_folder())
    rank.act_on(fresh_batch(rank._learner.model), "update", {})
    trained = dict(published_views(rank._learner.model))
    shipment = rank.ship("bfloat16")
    assert shipment is not None
    for name, tensor in asyncio.run(read_weights(shipment)).items():
        assert torch.equal(tensor, trained[name].bfloat16())
    rank.copy_state(0)
    kept = rank._copies[0].shipment
    assert kept is not None
    for name, tensor in asyncio.run(read_weights(kept)).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, trained[name])
    shipment = rank.ship("float32")
    rank.copy_state(1)
    assert rank._copies[1].shipment is shipment, "they are stored once if the types are the same"
