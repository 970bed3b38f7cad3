"""`python benchmarks/engine.py --model FOLDER` times any model that an engine computes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import engine
import pytest
import torch

from agentgym.trainers.model_check.small_models import save_small_model


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text"])
def test_the_backends_that_compute_a_model_are_timed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_small_model(kind, tmp_path)
    words = ["--model", str(tmp_path), "--requests", "1", "--prompt", "10", "--rounds", "1", "--json"]
    words += ["--threads", str(torch.get_num_threads()), "--sides", "fast", "transformers"]
    monkeypatch.setattr(sys, "argv", ["engine.py", *words])
    engine.main()
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["seconds"]) == (["fast", "transformers"] if kind == "llama" else ["transformers"])
    assert min(result["limits"].values()) > 0
