"""The compiled attention of slots: its numbers, and that a token's bits depend on nothing but what it sees."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentgym.engines.local.kernels.cpp_compiler import build
from agentgym.engines.local.kernels.slot_attention import SlotRows, attend_slots, attends_compiled, load_attention

NUM_SLOTS, WINDOW = 6, 640
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
TOLERANCE = {FLOAT32: 2e-6, BFLOAT16: 2e-2}
SHAPES = (
    (4, 2, 32, 32),
    (8, 8, 64, 64),
    (6, 2, 80, 80),
    (4, 1, 128, 128),
    (4, 4, 24, 16),
    (2, 2, 7, 7),
    (70, 1, 16, 16),
)
"""Query heads, key/value heads, and the widths of keys and values."""


def rows_of(*parts: tuple[int, int, int]) -> SlotRows:
    """Tokens of (slot, first position, number)."""
    slots = [torch.full((number,), slot) for slot, _, number in parts]
    positions = [torch.arange(first, first + number) for _, first, number in parts]
    return SlotRows(torch.cat(slots), torch.cat(positions))


ROWS = rows_of((0, 0, 300), (1, 255, 1), (2, 256, 1), (3, 639, 1), (4, 200, 190), (5, 0, 1))


def tensors(shape: tuple[int, int, int, int], dtype: torch.dtype, num_tokens: int) -> tuple[list[Tensor], Tensor]:
    """Random queries, keys and values of tokens, and stored ones."""
    num_heads, num_kv_heads, key_width, value_width = shape
    draw = torch.Generator().manual_seed(0)
    sizes = (num_heads, key_width), (num_kv_heads, key_width), (num_kv_heads, value_width)
    qkv = [torch.randn(num_tokens, *size, generator=draw).to(dtype) for size in sizes]
    stored = torch.randn(2, NUM_SLOTS, num_kv_heads, WINDOW, max(key_width, value_width), generator=draw).to(dtype)
    return [qkv[0] * key_width**-0.5, *qkv[1:]], stored


def reference(
    q_NHD: Tensor,
    widths: tuple[int, int],
    stored: Tensor,
    rows: SlotRows,
    sinks_H: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Attention in float64, token by token; the keys and values of the tokens are stored already."""
    outputs = []
    for number, (slot, position) in enumerate(zip(rows.slot_N.tolist(), rows.position_N.tolist(), strict=True)):
        first = 0 if rows.first_N is None else int(rows.first_N[number])
        keys_KLD = stored[0, slot, :, first : position + 1, : widths[0]].double()
        values_KLD = stored[1, slot, :, first : position + 1, : widths[1]].double()
        q_KGD = q_NHD[number].double().unflatten(0, (len(keys_KLD), -1))
        score_KGL = q_KGD @ keys_KLD.transpose(1, 2)
        if softcap is not None:
            score_KGL = torch.tanh(score_KGL / softcap) * softcap
        if sinks_H is not None:
            score_KGL = torch.cat([score_KGL, sinks_H.double().view(*score_KGL.shape[:2], 1)], 2)
        weight_KGL = score_KGL.softmax(2)[..., : keys_KLD.shape[1]]
        outputs.append((weight_KGL @ values_KLD).flatten(0, 1))
    return torch.stack(outputs)


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "window": {"window": 50},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 2.0},
    "all": {"window": 300, "sinks": True, "softcap": 30.0},
}


def attend(qkv: list[Tensor], stored: Tensor, rows: SlotRows, variant: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """Attention by the operator, and what else it was given."""
    if "window" in variant:
        rows = rows._replace(first_N=(rows.position_N - variant["window"] + 1).clamp(min=0))
    sinks_H = torch.linspace(-1, 3, qkv[0].shape[1]).to(stored.dtype) if "sinks" in variant else None
    softcap = variant.get("softcap")
    return attend_slots(qkv, stored, rows, sinks_H, softcap), (rows, sinks_H, softcap)


@pytest.mark.long(cases=6)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_it_is_attention_and_a_token_alone_has_the_same_bits(
    dtype: torch.dtype, shape: tuple[int, int, int, int], variant: Mapping[str, Any]
) -> None:
    qkv, stored = tensors(shape, dtype, len(ROWS.slot_N))
    assert attends_compiled(stored)
    out_NHD, inputs = attend(qkv, stored, ROWS, variant)
    right_NHD = reference(qkv[0], shape[2:], stored, *inputs)
    torch.testing.assert_close(out_NHD.double(), right_NHD, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for number in (0, 63, 64, 150, 299, 300, 301, 302, 303, 380, 492, 493):  # at the ends of tiles and blocks too
        own = slice(number, number + 1)
        rows = SlotRows(ROWS.slot_N[own], ROWS.position_N[own])
        alone_1HD, _ = attend([x[own] for x in qkv], stored, rows, variant)
        assert torch.equal(alone_1HD[0], out_NHD[number]), number


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_what_is_read_in_another_slot_changes_no_bit(
    dtype: torch.dtype, shape: tuple[int, int, int, int], variant: Mapping[str, Any]
) -> None:
    rows = rows_of((1, 639, 1), (0, 300, 1), (3, 310, 1), (2, 290, 1), (5, 270, 1), (4, 70, 90))
    qkv, stored = tensors(shape, dtype, len(rows.slot_N))
    roots, commons = (1, 0, 1, 1, 5, 4), (289, 0, 289, 289, 40, WINDOW)  # the own slot has what no other one has
    for slot, root, common in zip((1, 0, 3, 2), roots, commons, strict=False):
        stored[:, slot, :, :common] = stored[:, root, :, :common]
    sizes = torch.tensor([1, 1, 1, 1, 1, 90])
    root_N, common_N = (torch.tensor(values).repeat_interleave(sizes) for values in (roots, commons))
    own_NHD, _ = attend(qkv, stored.clone(), rows, variant)
    common_NHD, _ = attend(qkv, stored.clone(), rows._replace(root_N=root_N, common_N=common_N), variant)
    assert torch.equal(common_NHD, own_NHD)
    stored[:, (2, 3), :, :256] = 1e30  # it is read in the root indeed
    if "window" not in variant:
        assert torch.equal(attend(qkv, stored, rows._replace(root_N=root_N, common_N=common_N), variant)[0], own_NHD)


def test_keys_and_values_are_stored_and_nothing_else_is_changed() -> None:
    (q_NHD, k_NKD, v_NKD), stored = tensors((4, 2, 24, 16), FLOAT32, len(ROWS.slot_N))
    expected = stored.clone()
    expected[0, ROWS.slot_N, :, ROWS.position_N, :24] = k_NKD
    expected[1, ROWS.slot_N, :, ROWS.position_N, :16] = v_NKD
    attend_slots((q_NHD, k_NKD, v_NKD), stored, ROWS)
    assert torch.equal(stored, expected)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_no_bit(threads: int) -> None:
    qkv, stored = tensors((4, 2, 32, 32), FLOAT32, len(ROWS.slot_N))
    before = torch.get_num_threads()
    outputs = []
    for number in (1, threads):
        torch.set_num_threads(number)
        outputs.append(attend_slots(qkv, stored.clone(), ROWS))
    torch.set_num_threads(before)
    assert torch.equal(*outputs)


def test_what_later_positions_hold_is_not_seen() -> None:
    qkv, stored = tensors((4, 2, 32, 32), FLOAT32, 8)
    rows = rows_of((1, 250, 8))
    clean = attend_slots(qkv, stored.clone(), rows)
    stored[:, 1, :, 258:] = 1e30
    stored[:, 2:] = torch.nan
    assert torch.equal(attend_slots(qkv, stored, rows), clean)


def test_large_scores_stay_finite() -> None:
    qkv, stored = tensors((4, 2, 32, 32), FLOAT32, len(ROWS.slot_N))
    out_NHD, inputs = attend([qkv[0] * 3e4, *qkv[1:]], stored, ROWS, {})
    right_NHD = reference(qkv[0] * 3e4, (32, 32), stored, *inputs)
    torch.testing.assert_close(out_NHD.double(), right_NHD, atol=2e-2, rtol=0)  # scores of 1e5 end at 0.008


def test_other_dtypes_and_devices_are_left_to_torch() -> None:
    assert not attends_compiled(torch.zeros(1, dtype=torch.float16))
    assert not attends_compiled(torch.zeros(1, device="meta"))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to compile into an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "one.cpp"
    file.write_text('extern "C" int one() { return 1; }\n')
    return file


def test_the_library_is_compiled_once_and_again_for_another_source(source: Path) -> None:
    library = build(source)
    built_ns = library.stat().st_mtime_ns
    assert build(source).stat().st_mtime_ns == built_ns
    source.write_text('extern "C" int one() { return 2; }\n')
    assert build(source) != library
    assert sorted(path.suffix for path in library.parent.iterdir()) == [".so", ".so"]


def test_where_nothing_can_be_kept_it_is_compiled_for_this_process(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # no folder can be made in a file
    first, second = build(source), build(source)
    assert first.is_file() and second.is_file() and first != second
    assert first.parent.stat().st_mode & 0o077 == 0


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_message(source: Path) -> None:
    source.write_text("int one( { }\n")
    with pytest.raises(OSError, match=r"could not compile one.cpp: .*error"):
        build(source)
    assert not list((source.parent / "agentgym").iterdir())


def test_without_a_working_compiler_torch_computes_it_and_the_reason_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_attention.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not attends_compiled(torch.zeros(1))
    assert "broken could not compile slot_attention.cpp" in caplog.text
    load_attention.cache_clear()
