"""Measures how large a model fits one GPU, and what checkpoints, digests and handles of its memory take."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from probe_case import PEAK_FLOPS, Probe, Workload, make_learner, make_model

from agentgym.engines.weights.buckets import fused_digests, pickled_tensors, portions
from agentgym.model.model_folder import model_tensors, published_views, write_model
from agentgym.trainers.checkpoints.sharded_state import copy_to_cpu, load_state, save_state

RECEIVER = """
import base64, pickle, sys, torch
total = 0.0
for line in sys.stdin:
    total += sum(float(tensor.float().abs().sum()) for _, tensor in pickle.loads(base64.b64decode(line)))
    print("read", flush=True)
print(total)
"""


def fit(probe: Probe, shape: str, **config: Any) -> dict[str, Any]:
    """Takes two steps of a model of this size."""
    model, work = make_model(shape, probe.device), Workload("single", probe.shape)
    learner, batch = make_learner(model, device=probe.device, **config), work.batch()
    learner.update(batch)
    seconds = probe.seconds(lambda: learner.update(batch), 1, 0)
    mfu = work.step_flops(model.config) / seconds / PEAK_FLOPS
    weights_gb = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
    return {
        "weights_gb": round(weights_gb, 2),
        "seconds": round(seconds, 3),
        "tokens_per_s": round(sum(work.lengths) / seconds),
        "mfu": round(mfu, 4),
        "peak_gb": probe.peak_gb(),
    }


def save(probe: Probe) -> dict[str, Any]:
    """Takes the state of a learner to the disk and back, and digests its weights."""
    model = make_model(probe.shape, probe.device)
    learner = make_learner(model, device=probe.device)
    learner.update(Workload("single", "tiny").batch())
    report: dict[str, Any] = {}

    def measure(name: str, work: Callable[[], Any]) -> Any:
        probe.sync()
        started = time.perf_counter()
        result = work()
        probe.sync()
        report[f"{name}_s"] = round(time.perf_counter() - started, 3)
        return result

    state = measure("state_dict", learner.state_dict)
    on_cpu = measure("copy_to_cpu", lambda: copy_to_cpu(state))
    tensors = measure("model_tensors", lambda: model_tensors(model))
    with tempfile.TemporaryDirectory() as folder:
        measure("write_model", lambda: write_model(model.to_hf(), tensors, folder))
        measure("save_state", lambda: save_state(on_cpu, Path(folder, "learner")))
        measure("load_state", lambda: load_state(Path(folder, "learner")))
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    weights = {name: tensor.detach() for name, tensor in published_views(model)}
    measure("digests", lambda: fused_digests(weights))
    return report | {"saved_gb": round(size / 1e9, 2), "weights_gb": sum(w.nbytes for w in weights.values()) / 1e9}


def send_handles(probe: Probe) -> dict[str, Any]:
    """Sends all weights to another process: as handles of the GPU's memory, if they are there."""
    model = make_model(probe.shape, probe.device)
    weights = {name: tensor.detach() for name, tensor in published_views(model)}
    command = [sys.executable, "-c", RECEIVER]
    num_sent, seconds = 0, 0.0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for number, part in enumerate(portions(weights, 512_000_000)):
            started = time.perf_counter()
            line = b64encode(pickled_tensors(part)).decode()
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer == "read\n", answer
            num_sent += len(line)
            seconds += (time.perf_counter() - started) if number else 0.0  # the first waits for the other to start
        process.stdin.close()
        total = float(process.stdout.read())
    expected = sum(float(tensor.float().abs().sum()) for tensor in weights.values())
    return {
        "sent_bytes": num_sent,
        "seconds_after_the_first": round(seconds, 3),
        "equal": abs(total / expected - 1) < 1e-5,
    }


def main() -> None:
    """Runs the cases."""
    probe = Probe()
    probe.case("checkpoint and weights", lambda: save(probe), shape=probe.shape)
    probe.case("handles of memory", lambda: send_handles(probe), shape=probe.shape, protocol=pickle.HIGHEST_PROTOCOL)
    sizes = [("tiny", False)] if probe.is_tiny else [("1.7B", False), ("4B", True), ("4B", False), ("8B", True)]
    for shape, recomputes in sizes:
        about = {"shape": shape, "activation_checkpointing": recomputes}
        probe.case("fit", lambda about=about: fit(probe, **about), **about)


if __name__ == "__main__":
    main()
