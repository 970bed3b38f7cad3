"""Our AdamW is torch's, bit by bit, and leaves torch's compiler out."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from agentgym.trainers.learner.plain_optimizers import PlainAdamW


def trained(kind: type[torch.optim.AdamW], *, fused: bool) -> tuple[list[torch.Tensor], dict[str, object]]:
    """Parameters after ten steps, the last five by an optimizer that loaded the state of the first, and its state."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=generator, requires_grad=True) for shape in ((30, 40), (40,))]
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": fused}
    optimizer = kind([parameters[0]], **settings)
    optimizer.add_param_group({"params": [parameters[1]], "lr": 1e-3})
    for step in range(10):
        if step == 5:
            state = optimizer.state_dict()
            optimizer = kind([{"params": [parameter]} for parameter in parameters], **settings)
            optimizer.load_state_dict(state)
        (torch.randn(30, generator=generator) @ parameters[0] + parameters[1]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert all(parameter.grad is None for parameter in parameters)
    return [parameter.detach() for parameter in parameters], optimizer.state_dict()


@pytest.mark.parametrize("fused", [True, False])
def test_its_numbers_are_those_of_torch(fused: bool) -> None:
    (ours, state), (theirs, expected) = (trained(kind, fused=fused) for kind in (PlainAdamW, torch.optim.AdamW))
    assert all(map(torch.equal, ours, theirs))
    torch.testing.assert_close(state["state"], expected["state"], rtol=0, atol=0)
    assert state["param_groups"] == expected["param_groups"]


@pytest.mark.long
def test_neither_its_steps_nor_a_model_that_is_loaded_import_the_compiler() -> None:
    program = "import sys, torch; from agentgym.trainers.learner.plain_optimizers import PlainAdamW"
    program += "; from agentgym.embedded import embedded_folder; from agentgym.model.model_folder import load_decoder"
    program += "; x = load_decoder(embedded_folder()).final_norm.requires_grad_()"
    program += "; optimizer = PlainAdamW([x]); x.sum().backward(); optimizer.step(); optimizer.zero_grad()"
    program += "; optimizer.load_state_dict(optimizer.state_dict()); print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"
