"""The tokens of a forward pass where none are set: what a GPU's memory allows, within bounds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from agentgym.embedded import embedded_folder
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.model_folder import load_decoder
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.pass_tokens import fitting_tokens
from agentgym.trainers.parts.engine import with_pass_tokens
from agentgym.trainers.settings.learner import LearnerConfig


class OnGpu(Decoder):
    """A decoder without memory, which says that it is on a GPU."""

    @property
    def embed(self) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(device=torch.device("cuda", 0), element_size=lambda: 2)


@pytest.fixture
def on_gpu() -> OnGpu:
    """Qwen3-0.6B's shape."""
    shape = DecoderConfig(
        family="qwen3",
        vocab_size=151_936,
        width=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_width=128,
        ffn_width=3072,
        context_window=4096,
        qk_norm=True,
    )
    with torch.device("meta"):
        model = Decoder(shape)
    model.__class__ = OnGpu
    assert isinstance(model, OnGpu)
    return model


@pytest.mark.parametrize(
    ("free_gb", "recomputes", "tokens"),
    [
        (139, False, 16_384),
        (79, False, 8192),
        (39, False, 4096),
        (22, False, 2048),
        (8, False, 2048),
        (22, True, 16_384),
    ],
)
def test_a_pass_takes_what_the_memory_allows(
    free_gb: int, recomputes: bool, tokens: int, on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gb * 10**9, 140 * 10**9))
    assert fitting_tokens(on_gpu, recomputes=recomputes, reserve_bytes=16 * 0.6e9, share=0.5) == tokens


def test_a_cpu_a_cluster_and_a_setting_keep_theirs() -> None:
    model = load_decoder(embedded_folder())
    assert fitting_tokens(model, recomputes=False) == 2048
    config = TrainConfig(env="TextGame-v0", learner=LearnerConfig(micro_batch_tokens=77))
    assert with_pass_tokens(config, model).learner.pass_tokens == 77
    plain = TrainConfig(env="TextGame-v0")
    assert with_pass_tokens(plain, model).learner.micro_batch_tokens == 2048
    assert LearnerConfig().pass_tokens == 2048
