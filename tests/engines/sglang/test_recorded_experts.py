"""SGLang's record of experts as it is read, asked for, and refused."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.serving_settings import EngineServing
from agentgym.engines.sglang.api import read_experts
from agentgym.engines.sglang.engine import expert_shape, model_limits, sglang_command
from agentgym.engines.weights.buckets import fused_digests, pad_vocabulary
from agentgym.errors import ConfigError, EngineError

EXPERTS = np.arange(5 * 3 * 2, dtype="<i4").reshape(5, 3, 2)


def answer(text: str | None, ids: tuple[int, ...] = (1,)) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {} if text is None else {"routed_experts": text}}


def test_a_record_is_read_by_tokens_layers_and_choices() -> None:
    experts = read_experts(answer(b64encode(EXPERTS.tobytes()).decode()), (3, 2), 5, name="server")
    assert experts is not None and (experts.start, experts.stop) == (0, 5)
    assert np.array_equal(experts.experts_TRK, EXPERTS)
    assert read_experts(answer(None, ()), (3, 2), 0, name="server") is None


def test_a_record_of_other_tokens_or_none_is_refused() -> None:
    text = b64encode(EXPERTS.tobytes()).decode()
    with pytest.raises(EngineError, match="server returned 30 experts where 4 tokens x 3 layers x 2 were expected"):
        read_experts(answer(text), (3, 2), 4, name="server")
    with pytest.raises(EngineError, match="start it with --enable-return-routed-experts"):
        read_experts(answer(None), (3, 2), 5, name="server")


def test_a_launched_server_records_where_that_is_asked(tmp_path: Path) -> None:
    flag = "--enable-return-routed-experts"
    assert flag not in sglang_command(ServerConfig(), tmp_path, 1)
    assert flag in sglang_command(ServerConfig(serving=EngineServing(record_experts=True)), tmp_path, 1)


def test_sizes_are_those_of_the_language_part(tmp_path: Path) -> None:
    text = {"vocab_size": 320, "max_position_embeddings": 64, "num_hidden_layers": 3, "num_experts_per_tok": 2}
    for config in (text, {"model_type": "some_vl", "text_config": text}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert model_limits(tmp_path) == (320, 64) and expert_shape(tmp_path) == (3, 2)
    (tmp_path / "config.json").write_text(json.dumps(text | {"num_experts_per_tok": None}))
    with pytest.raises(ConfigError, match="record_experts is for mixtures of experts"):
        expert_shape(tmp_path)


def test_a_vocabulary_is_padded_with_rows_of_zeros() -> None:
    head, norm = torch.ones(300, 4), torch.ones(300, 4)
    padded = pad_vocabulary("lm_head.weight", head)
    assert padded.shape == (320, 4) and padded[:300].all() and not padded[300:].any()
    assert pad_vocabulary("model.norm.weight", norm) is norm
    assert pad_vocabulary("lm_head.weight", padded) is padded
    assert fused_digests({"lm_head.weight": padded}) != fused_digests({"lm_head.weight": head})
