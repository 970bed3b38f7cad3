"""What an engine has is held against what it was sent: exactly where it can be, by what changed elsewhere."""

from __future__ import annotations

import pytest
import torch

from agentgym.engines.vllm.worker_extension import _sum
from agentgym.engines.weights import buckets
from agentgym.engines.weights.buckets import fused_digests, fused_sums
from agentgym.engines.weights.check import WeightCheck
from agentgym.errors import EngineError

OLD, NEW = {"a": "1", "b": "1", "c": "1"}, {"a": "2", "b": "2", "c": "1"}


@pytest.mark.parametrize("sums", [{**NEW, "b": "1"}, {"a": "2", "c": "1"}])
def test_a_parameter_that_differs_or_is_missing_is_named(sums: dict[str, str]) -> None:
    check = WeightCheck("the engine", is_exact=True)
    check.compare(OLD, {**OLD, "of its own": "7"}, 1)
    with pytest.raises(
        EngineError,
        match=r"stale weights: 1 of 3 tensors of the engine are .* version 2, the first is 'b': it was left",
    ):
        check.compare(NEW, sums, 2)


def test_an_engines_own_hash_must_change_with_each_changed_tensor() -> None:
    check = WeightCheck("the engine", is_exact=False)
    check.compare(OLD, {"a": "x", "b": "x", "c": "x"}, 1)
    check.compare(NEW, {"a": "y", "b": "y", "c": "x"}, 2)
    with pytest.raises(EngineError, match=r"1 of 3 tensors .* version 3, the first is 'a'"):
        check.compare(OLD, {"a": "y", "b": "x", "c": "x"}, 3)


def test_what_arrives_after_an_update_that_did_not_is_taken() -> None:
    for is_exact in (True, False):
        check = WeightCheck("the engine", is_exact=is_exact)
        check.compare(OLD, OLD, 1)
        with pytest.raises(EngineError, match="2 of 3"):
            check.compare(NEW, OLD, 2)
        check.compare(NEW, NEW, 2)


def test_digests_of_change_name_parameters_as_the_engine_does_and_see_any_change() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q_proj.weight": (6, 5), "k_proj.weight": (3, 5), "norm.weight": (7,), "bias": (1,)}
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    before = fused_sums(weights)
    assert before.keys() == fused_digests(weights).keys() == {"qkv_proj.weight", "norm.weight", "bias"}
    assert before == fused_sums({name: tensor.clone() for name, tensor in reversed(weights.items())})
    for name, tensor in weights.items():
        flat = tensor.view(-1)
        for place in range(len(flat)):
            value = flat[place].clone()
            flat[place] += flat[place] * 2**-7  # the smallest step of bfloat16
            assert fused_sums(weights) != before, (name, place)
            flat[place] = value
    weights["norm.weight"] = weights["norm.weight"].flip(0)
    changed = fused_sums(weights)
    assert {name for name in before if changed[name] != before[name]} == {"norm.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_sums_do_not_depend_on_how_a_tensor_lies_in_memory(dtype: torch.dtype) -> None:
    tensor = torch.arange(15).view(3, 5).to(dtype)
    assert fused_sums({"w": tensor.t()}) == fused_sums({"w": tensor.t().contiguous()})
    assert fused_sums({"w": tensor[1:]}) == fused_sums({"w": tensor[1:].clone()})
    assert fused_sums({"w": tensor[:0]}) == {"w": "0"}
    assert fused_sums({}) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_worker_of_vllm_sums_a_fused_parameter_as_its_parts_are_summed(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "_WORDS_AT_ONCE", 7)
    parts = {f"{kind}_proj.weight": torch.randn(size, 5).to(dtype) for kind, size in (("v", 2), ("q", 6), ("k", 3))}
    fused = torch.cat([parts[f"{kind}_proj.weight"] for kind in "qkv"])
    assert fused_sums(parts) == {"qkv_proj.weight": str(int(_sum(fused)))}
    assert fused_sums({**parts, "v_proj.weight": -parts["v_proj.weight"]}) != fused_sums(parts)
