"""`gpu_kernels_process.py interpret | compile` checks the kernels of a GPU without one: what they compute, by Triton's
interpreter, or whether they compile for a Hopper GPU in each dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from agentgym.engines.local.graphed_step import GraphedStep
from agentgym.engines.local.kernels import gpu_attention, gpu_rows
from agentgym.engines.local.kernels.gpu_attention import attend_tiles
from agentgym.engines.local.kernels.gpu_rows import rotate_and_store
from agentgym.engines.local.kernels.gpu_tiles import GpuTiles, cut_prompts
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.rows import Rows
from agentgym.engines.local.step import StepRunner
from agentgym.model.decoder import Decoder, DecoderConfig, apply_rope
from agentgym.model.ops import gpu_head
from agentgym.model.ops import gpu_rows as training_rows
from agentgym.model.ops.gpu_rows import gate, rotate
from agentgym.model.pass_attention import Scores
from agentgym.trainers.learner import token_logprobs
from agentgym.trainers.learner.token_logprobs import score_targets

NUM_SLOTS, DECODED = 5, 3
SLOT_N = torch.tensor([0, 2, 3] + [4] * 70 + [1] * 3)
POSITION_N = torch.tensor([100, 5, 200, *range(30, 100), 0, 1, 2])
HEADS = [(4, 2, 16, 16), (6, 2, 24, 16), (8, 1, 64, 64)]
"""The numbers of query heads and key/value heads, and the widths of keys and values."""


def attention_of(q_NHD: Tensor, stored: Tensor, widths: Sequence[int], scores: Scores, first_N: Tensor) -> Tensor:
    """Attention of each token to the stored keys of its slot, by its definition."""
    outputs, group = [], q_NHD.shape[1] // stored.shape[2]
    for token, q_HD in enumerate(q_NHD.float()):
        seen = slice(int(first_N[token]), int(POSITION_N[token]) + 1)
        k_HLD, v_HLD = (
            stored[part, SLOT_N[token], :, seen, :width].float().repeat_interleave(group, 0)
            for part, width in enumerate(widths)
        )
        score_HL = torch.einsum("hd,hld->hl", q_HD, k_HLD)
        if scores.softcap:
            score_HL = torch.tanh(score_HL / scores.softcap) * scores.softcap
        if scores.sinks_H is not None:
            score_HL = torch.cat([score_HL, scores.sinks_H[:, None]], 1)
        weight_HL = score_HL.softmax(-1)[:, : k_HLD.shape[1]]
        outputs.append(torch.einsum("hl,hld->hd", weight_HL, v_HLD))
    return torch.stack(outputs)


def check_attention(heads: tuple[int, int, int, int], dtype: torch.dtype, num_splits: int, is_padded: bool) -> None:
    num_heads, num_kv_heads, *widths = heads
    generator, size = torch.Generator().manual_seed(0), len(SLOT_N)
    stored = torch.randn(2, NUM_SLOTS + 1, num_kv_heads, 256, max(widths), generator=generator).to(dtype)
    shapes = (num_heads, widths[0]), (num_kv_heads, widths[0]), (num_kv_heads, widths[1])
    q_NHD, k_NKD, v_NKD = (torch.randn(size, *shape, generator=generator).to(dtype) for shape in shapes)
    q_NHD = q_NHD * widths[0] ** -0.5
    is_rich = widths[0] == 24
    sinks_H = torch.randn(num_heads, generator=generator) if is_rich else None
    scores, first_N = Scores(1.0, 5.0 if is_rich else None, sinks_H), (POSITION_N - 40).clamp(min=0)
    tile_C = torch.from_numpy(cut_prompts(DECODED, [70, 3], num_heads // num_kv_heads))
    tiles = GpuTiles(SLOT_N, POSITION_N, DECODED, *tile_C, num_splits=num_splits)
    if is_padded:  # as in a graph: more tiles than there are, and the number of those that decode is on the device
        long_tile_C = F.pad(tile_C, (0, 9))
        tiles = GpuTiles(SLOT_N, POSITION_N, size, *long_tile_C, torch.tensor([DECODED]), num_splits)
    expected = stored.clone()
    for part, (x_NKD, width) in enumerate(zip((k_NKD, v_NKD), widths, strict=True)):
        expected[part, SLOT_N, :, POSITION_N, :width] = x_NKD
    actual_NHD = attend_tiles((q_NHD, k_NKD, v_NKD), stored, tiles, scores, first_N if is_rich else None)
    assert torch.equal(stored, expected)
    expected_NHD = attention_of(q_NHD, expected, widths, scores, first_N if is_rich else first_N * 0)
    torch.testing.assert_close(
        actual_NHD.float(), expected_NHD, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 2e-3
    )


def check_rows(has_norms: bool) -> None:
    generator, (num_heads, num_kv_heads, width, window) = torch.Generator().manual_seed(0), (4, 2, 16, 32)
    stored = torch.zeros(2, NUM_SLOTS, num_kv_heads, window, width)
    flat_NO = torch.randn(5, (num_heads + 2 * num_kv_heads) * width, generator=generator)
    slot_N, position_N = torch.tensor([0, 1, 1, 2, 3]), torch.tensor([4, 7, 8, 0, 31])
    angle_TD = torch.randn(window, width // 2, generator=generator)
    cos_TD, sin_TD = torch.cat([angle_TD.cos()] * 2, -1), torch.cat([-angle_TD.sin(), angle_TD.sin()], -1)
    norms = [torch.randn(width, generator=generator) if has_norms else None for _ in range(2)]
    q_NHD = rotate_and_store(flat_NO, stored, (slot_N, position_N), (cos_TD, sin_TD), norms, 1e-6)
    wanted_q, wanted_k, wanted_v = flat_NO.view(5, -1, width).split([num_heads, num_kv_heads, num_kv_heads], 1)
    if has_norms:
        wanted_q, wanted_k = (
            F.rms_norm(x, (width,), norm, 1e-6) for x, norm in zip((wanted_q, wanted_k), norms, strict=True)
        )
    wanted_q, wanted_k = (apply_rope(x, cos_TD[position_N], sin_TD[position_N]) for x in (wanted_q, wanted_k))
    torch.testing.assert_close(q_NHD, wanted_q * width**-0.5)
    torch.testing.assert_close(stored[0, slot_N, :, position_N], wanted_k)
    torch.testing.assert_close(stored[1, slot_N, :, position_N], wanted_v)


def check_training_rows(num_heads: int, width: int) -> None:
    """Compares outputs and gradients of what the learner shares with the engine; heads are a view of wider rows."""
    generator = torch.Generator().manual_seed(0)
    flat_NO = torch.randn(7, (num_heads + 3) * width, generator=generator).requires_grad_()
    angle_ND = torch.randn(7, width // 2, generator=generator)
    cos_ND, sin_ND = torch.cat([angle_ND.cos()] * 2, -1), torch.cat([-angle_ND.sin(), angle_ND.sin()], -1)
    cos_ND = cos_ND * torch.randn(7, width, generator=generator)  # any factors, not those of a rotation alone
    x_NHD = flat_NO[:, : num_heads * width].unflatten(1, (num_heads, width))
    gate_input_NF = torch.randn(3, 3000, generator=generator).requires_grad_()
    a, b = gate_input_NF.chunk(2, -1)
    for output, expected, inputs in (
        (rotate(x_NHD, cos_ND, sin_ND), apply_rope(x_NHD, cos_ND, sin_ND), flat_NO),
        (gate(gate_input_NF), F.silu(a) * b, gate_input_NF),
    ):
        torch.testing.assert_close(output, expected)
        weights = torch.randn(output.shape, generator=generator)
        gradients = (torch.autograd.grad(x, inputs, weights) for x in (output, expected))
        torch.testing.assert_close(*gradients)


def check_head(temperature: float, softcap: float | None, has_entropy: bool, dtype: torch.dtype) -> None:
    """Compares scores and gradients of targets by the kernels with those by torch; chunks of few rows."""
    generator, results = torch.Generator().manual_seed(0), []
    hidden_NE = (3 * torch.randn(21, 8, generator=generator)).to(dtype)
    head_VE, target_N = torch.randn(5000, 8, generator=generator).to(dtype), torch.arange(21) * 238
    weights = torch.randn(2, 21, generator=generator)
    for kernels in (gpu_head, None):
        inputs = [x.clone().requires_grad_() for x in (hidden_NE, head_VE)]
        with (
            patch.object(token_logprobs, "_kernels", lambda _, choice=kernels: choice),
            patch.object(token_logprobs, "_chunks", lambda *_: [slice(0, 8), slice(8, 16), slice(16, 24)]),
        ):
            logp_N, entropy_N = score_targets(*inputs, target_N, temperature, softcap=softcap)
            loss = logp_N.sum() if not has_entropy else (weights[0] * logp_N + weights[1] * entropy_N).sum()
            results.append([logp_N, entropy_N, *torch.autograd.grad(loss, inputs)])
    close = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **close)


@torch.inference_mode()
def check_step(num_heads: int, num_kv_heads: int) -> None:
    """Compares the logits of steps, padded as in a graph, with those of the step of operators."""
    sizes = {"vocab_size": 50, "width": 32, "num_layers": 2, "ffn_width": 24, "context_window": 256, "rope_theta": 1e4}
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_width": 16, "qk_norm": True}
    model = Decoder(DecoderConfig(family="qwen3", **sizes, **heads)).initialize(0)
    cache, others = (SlotCache(model, 3, 256) for _ in range(2))
    cache.tokens_SW[:] = others.tokens_SW[:] = np.random.default_rng(0).integers(50, size=cache.tokens_SW.shape)
    step, plain = GraphedStep(model, cache), StepRunner(model, others)
    step._records, plain._attends_compiled = False, False
    num_known = [0, 0, 0]
    for decoded, extends in (([], [(0, 129)]), ([0], [(1, 2), (2, 66)]), ([0, 1], [(2, 5)]), ([0, 1, 2], [])):
        parts = [*((slot, 1) for slot in decoded), *extends]
        slot_N = np.concatenate([np.full(size, slot) for slot, size in parts])
        position_N = np.concatenate([np.arange(num_known[slot], num_known[slot] + size) for slot, size in parts])
        firsts = tuple((slot, num_known[slot], size) for slot, size in extends)
        rows = Rows(slot_N, position_N, len(decoded), firsts, np.cumsum([size for _, size in parts]) - 1)
        torch.testing.assert_close(step.forward(rows), plain.forward(rows), rtol=1e-4, atol=1e-5)
        for slot, size in parts:
            num_known[slot] += size


def compile_kernel(kernel: Any, types: Mapping[str, str], constants: Mapping[str, object], stages: int) -> int:
    """Compiles a kernel for a Hopper GPU; returns the bytes of shared memory that it takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=values)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": stages})
    assert compiled.asm["ptx"]
    return int(compiled.metadata.shared)


def compile_all(number: str, element_size: int) -> None:
    """Compiles every kernel for models of one dtype, as the engine launches them."""
    tensor, index, stages = f"*{number}", "*i64", gpu_attention._STAGES[element_size]
    of_tokens = dict.fromkeys(("slot_N", "position_N", "first_N", "first_C", "count_C", "decoded"), index)
    tensors = dict.fromkeys("q k v keys values out flat cos sin q_norm k_norm".split(), tensor)
    types = {**tensors, **of_tokens, "sinks_H": "*fp32", "sums": "*fp32", "parts": "*fp32"}
    types |= dict.fromkeys(("softcap", "eps", "scale"), "fp32")
    compile_kernel(gpu_attention._store, types, {"PADDED": 128}, stages)
    compile_kernel(gpu_attention._merge, types, {"SPLITS": 8, "NUM_SPLITS": 6, "PADDED": 128}, stages)
    types |= dict.fromkeys(("x", "grad"), tensor)
    for kernel in (training_rows._gate_kernel, training_rows._gate_back_kernel):
        compile_kernel(kernel, types, {"BLOCK": 1024}, stages)
    for is_back in (False, True):
        sizes = {"HALF": 64, "HEADS": 16, "PADDED": 64, "IS_BACK": is_back}
        compile_kernel(training_rows._rotate_kernel, types, sizes, stages)
    of_rows = dict.fromkeys("logp entropy total grad_logp grad_entropy".split(), "*fp32")
    of_rows |= {"logits": tensor, "target": index, "scale": "fp32", "cap": "fp32"}
    for caps in (False, True):
        compile_kernel(gpu_head._normalize_kernel, of_rows, {"CAPS": caps, "BLOCK": gpu_head._BLOCK}, stages)
        for has_entropy in (False, True):
            sizes = {"CAPS": caps, "HAS_ENTROPY": has_entropy, "BLOCK": gpu_head._BLOCK}
            compile_kernel(gpu_head._slope_kernel, of_rows, sizes, stages)
    for without in ((), ("q_norm", "k_norm")):
        widths = {"WIDTH": 128, "PADDED": 128, **dict.fromkeys(without)}
        compile_kernel(gpu_rows._rotate_and_store, types, widths, stages)
    common = {"GROUP": 2, "KEYS": gpu_attention._KEYS[element_size], "KEY_WIDTH": 128, "VALUE_WIDTH": 128}
    common |= {"KEY_PADDED": 128, "VALUE_PADDED": 128, "PRECISION": "ieee" if element_size == 4 else "tf32"}
    plain, prompts = ("first_N", "sinks_H"), ("first_C", "count_C")
    for rows, num_splits, without in (
        (16, 1, ("sums", "decoded", *plain, *prompts)),
        (16, 4, (*plain, *prompts)),
        (64, 1, ("sums", "decoded")),
        (64, 1, ("sums", "decoded", *plain)),
    ):
        chosen = {"ROWS": rows, "SPLITS": num_splits, "HAS_SOFTCAP": "sinks_H" not in without}
        out = {"out": "*fp32"} if num_splits > 1 else {}
        shared = compile_kernel(gpu_attention._attend, types | out, common | chosen | dict.fromkeys(without), stages)
        assert shared <= 99 * 1024, shared  # of the smallest GPUs that matter


def main() -> None:
    if sys.argv[1] == "interpret":  # whose products in bfloat16 are wrong
        for arguments in product(HEADS, (torch.float32, torch.float16), (1, 4), (False, True)):
            check_attention(*arguments)
        for has_norms in (True, False):
            check_rows(has_norms)
        for num_heads, width in ((4, 16), (3, 24)):
            check_training_rows(num_heads, width)
        for temperature, softcap, has_entropy in ((1.0, None, False), (0.7, None, True), (1.3, 20.0, True)):
            for dtype in (torch.float32, torch.float16):
                check_head(temperature, softcap, has_entropy, dtype)
        with patch.object(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=3)):
            for num_heads, num_kv_heads in ((4, 2), (6, 1)):
                check_step(num_heads, num_kv_heads)
    else:
        for number, element_size in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
            compile_all(number, element_size)
    print("checked")


if __name__ == "__main__":
    main()
