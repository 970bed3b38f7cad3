"""The products of training against `F.linear`, in our own code and in that of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentgym.model import linear as products
from agentgym.model.linear import FastProducts
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import load_policy
from agentgym.trainers.model_check.small_models import save_small_model


@pytest.fixture
def num_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each product that oneDNN computes."""
    row_counts: list[int] = []
    compute: Callable[[Tensor, Tensor], Tensor] = products._onednn

    def counted(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        row_counts.append(len(x_NI))
        return compute(x_NI, weight_OI)

    monkeypatch.setattr(products, "_onednn", counted)
    return row_counts


@pytest.mark.parametrize(
    ("shape", "width", "padded"),
    [
        ((100,), 512, 128),
        ((3, 50), 512, 160),
        ((31,), 512, 0),
        ((0,), 512, 0),
        ((1, 128), 24, 128),
        ((100,), 24, 0),  # a kernel of its own for little work
    ],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_layer_of_other_code_has_its_outputs_and_gradients(
    shape: tuple[int, ...], width: int, padded: int, has_bias: bool, num_rows: list[int]
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(width, 256, bias=has_bias), torch.randn(*shape, width, requires_grad=True)
    expected = layer(x)
    inputs = (x, *layer.parameters())
    wanted_gradients = torch.autograd.grad(expected.square().sum(), inputs)
    with FastProducts():
        output = layer(x)
    gradients = torch.autograd.grad(output.square().sum(), inputs)
    for own, theirs in zip((output, *gradients), (expected, *wanted_gradients), strict=True):
        largest = float(theirs.detach().abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(own.detach(), theirs.detach(), atol=1e-5 * largest, rtol=0)
    assert num_rows[:1] == ([padded] if padded else [])


def test_other_numbers_and_devices_keep_their_own(num_rows: list[int]) -> None:
    with FastProducts():
        half = F.linear(torch.ones(64, 8, dtype=torch.bfloat16), torch.ones(4, 8, dtype=torch.bfloat16))
        elsewhere = F.linear(torch.ones(64, 8, device="meta"), torch.ones(4, 8, device="meta"))
    assert (half.dtype, elsewhere.device.type, num_rows) == (torch.bfloat16, "meta", [])


@pytest.mark.parametrize("recomputes", [False, True])
def test_every_product_of_a_learning_pass_is_the_fast_one(
    recomputes: bool, num_rows: list[int], tmp_path: Path
) -> None:
    """Forward, twice in the backward pass, and forward again where blocks are computed again."""
    save_small_model("gemma2", tmp_path)
    model = load_policy(tmp_path)
    model.set_recompute(recomputes)
    num_layers = 4 * 7  # of four blocks
    num_rows.clear()
    ids_N = torch.arange(3, 131)
    model.hidden_states(ids_N, PackedLayout([len(ids_N)])).sum().backward()
    assert len(num_rows) == num_layers * (4 if recomputes else 3)
