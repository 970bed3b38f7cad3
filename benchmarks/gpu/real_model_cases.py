"""Runs `benchmarks/real_model.py`: seconds and memory of each phase, and the curves of a pretrained model by step.

`--model FOLDER` names the model. Without it the weights are random, of the probe's shape, and only the seconds count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from probe_case import Probe, make_model

from agentgym.embedded import embedded_folder
from agentgym.model.model_folder import save_model_folder
from agentgym.trainers.checkpoints.checkpoint import copy_tokenizer

SCRIPT = Path(__file__).resolve().parents[1] / "real_model.py"
MINUTES = 5.0


def learn(probe: Probe, task: str) -> dict[str, Any]:
    """Returns the records of the phases."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, output = Path(probe.model or Path(scratch, "model")), Path(scratch, "run")
        if not probe.model:
            save_model_folder(make_model(probe.shape, probe.device), folder, dtype=torch.bfloat16)
            copy_tokenizer(embedded_folder(), folder)
            probe.free_memory()
        words = [
            "--model",
            str(folder),
            "--task",
            task,
            "--device",
            probe.device,
            "--minutes",
            str(MINUTES),
            "--no-trl",
        ]
        words += ["--chat-template", probe.chat_template] if probe.chat_template else []
        words += ["--steps", "2", "--episodes", "8"] if probe.is_tiny else []
        command = [sys.executable, str(SCRIPT), *words, "--output", str(output)]
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        phases: dict[str, dict[str, Any]] = json.loads((output / "results.json").read_text())["phases"]
    for record in phases.values():
        del record["command"]
    return {"exit_code": done.returncode, **phases}


def main() -> None:
    """Runs the cases."""
    probe = Probe()
    for task in ("sums", "orders"):
        probe.case("learn", lambda task=task: learn(probe, task), task=task, model=probe.model or probe.shape)


if __name__ == "__main__":
    main()
