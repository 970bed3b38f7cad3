"""Trained tokens a second and memory of a training step whose rows share their prompt: shared, packed, padded, and TRL.

A group of rows begins with the same prompt; only the replies are trained. `shared` is how the learner computes it (the
prompt once, only what is trained to the end), `packed` the same code with nothing shared, and `padded` is transformers
on a rectangle of rows with whole logits. `trl` is the loss of TRL's GRPOTrainer, in an environment of its own that the
first run makes (`peer_environments.py`): without gradient checkpointing, the fastest that it has, and `trl_frugal`
with, its default. All have the same weights, rows and loss; each runs in a process of its own, on one core in fp32.
Before anything is timed their logprobs and gradients must agree.

    python benchmarks/train_step.py [--group 16] [--prompt 1000] [--no-trl] [--json]

With `--vocabulary`, the memory that logprobs over a large vocabulary take besides the model's own activations.

    python benchmarks/train_step.py --vocabulary 150000 --tokens 8000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before torch is imported

import torch
from memory import Memory
from peer_environments import run_beside_trl
from safetensors.torch import load_file
from torch import Tensor

from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.model_folder import load_decoder, published_views, save_model_folder
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.learner.token_logprobs import score_targets

SIDES = ("shared", "packed", "padded")
TRL_SIDES = ("trl", "trl_frugal")
TRL_SCRIPT = Path(__file__).with_name("train_step_trl.py")
AGREEMENT = 1e-5
MICRO_TOKENS = 8192
LIMIT_S = 900


@dataclass(frozen=True)
class Rows:
    """One group: rows with the same prompt and replies of 32 to 96 tokens; `weight` is each trained token's."""

    ids: tuple[tuple[int, ...], ...]
    prompt: int

    @classmethod
    def draw(cls, size: int, prompt: int, vocab_size: int, seed: int = 0) -> Rows:
        """Returns random ids; the same for every side."""
        rng = random.Random(seed)
        start = tuple(rng.randrange(vocab_size) for _ in range(prompt))
        replies = [tuple(rng.randrange(vocab_size) for _ in range(rng.randint(32, 96))) for _ in range(size)]
        return cls(tuple(start + reply for reply in replies), prompt)

    @property
    def num_trained(self) -> int:
        """The number of tokens of the replies."""
        return sum(len(row) - self.prompt for row in self.ids)

    def weight(self, row: int, place: int) -> float:
        """Returns an advantage like those of a group: of either sign."""
        return (((row * 7 + place) % 5) - 2) / self.num_trained


def config_of(vocab_size: int, window: int) -> DecoderConfig:
    """Returns the shape of the embedded model, with another window and vocabulary."""
    return DecoderConfig(
        family="qwen3",
        vocab_size=vocab_size,
        width=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_width=32,
        ffn_width=384,
        context_window=window,
        qk_norm=True,
    )


def parts_of(rows: Rows, *, shares: bool) -> list[list[int]]:
    """Returns micro-batches of rows, by the tokens that are computed."""
    parts: list[list[int]] = [[]]
    room = MICRO_TOKENS
    for number, row in enumerate(rows.ids):
        cost = len(row) - (rows.prompt if shares and parts[-1] else 0)
        if cost > room:
            parts.append([])
            room, cost = MICRO_TOKENS, len(row)
        parts[-1].append(number)
        room -= cost
    return parts


def ours(model: Decoder, rows: Rows, *, shares: bool) -> Tensor:
    """Runs one pass forward and backward, micro-batch by micro-batch; returns the logprobs of the trained tokens."""
    logps = []
    for part in parts_of(rows, shares=shares):
        ids_N = torch.tensor([token for number in part for token in rows.ids[number][:-1]])
        lengths = [len(rows.ids[number]) - 1 for number in part]
        places = [(number, place) for number, length in zip(part, lengths, strict=True) for place in range(length)]
        mask_N = torch.tensor([place >= rows.prompt - 1 for _, place in places])
        target_M = torch.tensor([rows.ids[number][place + 1] for number, place in places])[mask_N]
        weight_M = torch.tensor([rows.weight(number, place) for number, place in places])[mask_N]
        layout = PackedLayout(lengths, ids_N=ids_N if shares else None, mask_N=mask_N)
        logp_M = score_targets(model.hidden_states(ids_N, layout), model.head_weight, target_M).logp_N
        (-weight_M * logp_M).sum().backward()
        logps.append(logp_M.detach())
    return torch.cat(logps)


def run_padded(model: torch.nn.Module, rows: Rows) -> Tensor:
    """Does the same with transformers, on all rows at once, padded to the longest."""
    longest = max(len(row) for row in rows.ids)
    ids_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows.ids])
    is_token_BT = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows.ids])
    logits_BTV = model(input_ids=ids_BT[:, :-1], attention_mask=is_token_BT[:, :-1]).logits
    logp_BT = logits_BTV.float().log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    weight_BT = torch.zeros_like(logp_BT)
    mask_BT = torch.zeros_like(logp_BT, dtype=torch.bool)
    for number, row in enumerate(rows.ids):
        for place in range(rows.prompt - 1, len(row) - 1):
            weight_BT[number, place], mask_BT[number, place] = rows.weight(number, place), True
    (-weight_BT * logp_BT).sum().backward()
    return logp_BT.detach()[mask_BT]


def run_side(side: str, folder: Path, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the logprobs of one pass, and its gradients by published names."""
    if side == "padded":
        other = reference(folder)
        logp_M = run_padded(other, rows)
        return logp_M, {
            name: parameter.grad for name, parameter in other.named_parameters() if parameter.grad is not None
        }
    model = load_decoder(folder)
    logp_M = ours(model, rows, shares=side == "shared")
    return logp_M, gradients(model)


def reference(folder: Path) -> torch.nn.Module:
    """Loads the model with transformers."""
    from transformers import AutoModelForCausalLM  # takes seconds, and only one side needs it

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def gradients(model: Decoder) -> dict[str, Tensor]:
    """Returns the gradients by published names."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
        return {name: view.clone() for name, view in published_views(model)}


def run_trl(side: str, folder: Path, rows: Rows, *, repeats: int = 0, save: Path | None = None) -> dict[str, float]:
    """Returns the measurements of TRL's side; with `save`, it writes its logprobs and gradients there instead."""
    places = [range(rows.prompt - 1, len(row) - 1) for row in rows.ids]
    spec = {
        "model": str(folder),
        "rows": rows.ids,
        "prompt": rows.prompt,
        "advantages": [
            [rows.weight(row, at) * rows.num_trained for at in trained] for row, trained in enumerate(places)
        ],
        "bf16": False,
        "checkpointing": side == "trl_frugal",
        "repeats": repeats,
        "save": None if save is None else str(save),
    }
    measured: dict[str, float] = run_beside_trl(TRL_SCRIPT, spec)
    return measured


def check(folder: Path, vocab_size: int, *, trl: bool) -> float:
    """Returns the largest difference between the sides; ends the program beyond `AGREEMENT`.

    Compares logprobs, and gradients relative to the largest of a tensor.
    """
    rows = Rows.draw(4, 200, vocab_size, seed=1)
    results = {side: run_side(side, folder, rows) for side in SIDES}
    for side in TRL_SIDES if trl else ():
        run_trl(side, folder, rows, save=folder / "trl.safetensors")
        tensors = load_file(folder / "trl.safetensors")
        results[side] = (tensors.pop("logprobs"), tensors)
        (folder / "trl.safetensors").unlink()  # the folder is a model's
    logp_M, expected = results.pop("padded")
    worst = 0.0
    for other_M, other in results.values():
        worst = max(worst, float((other_M - logp_M).abs().max()))
        for name, gradient in expected.items():
            worst = max(worst, float((other[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-12)))
    if worst > AGREEMENT:
        sys.exit(f"the sides differ by {worst:.2g}, more than {AGREEMENT:g}: nothing was timed")
    return worst


def time_side(side: str, folder: Path, rows: Rows, repeats: int) -> dict[str, float]:
    """Returns seconds of a step with AdamW, the median of `repeats` after one more, and the memory of the steps."""
    model = reference(folder) if side == "padded" else load_decoder(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for parameter in model.parameters():  # the optimizer's own memory is the same on every side
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    memory = Memory()
    seconds, cpu = [], []
    for _ in range(repeats + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        if isinstance(model, Decoder):
            ours(model, rows, shares=side == "shared")
        else:
            run_padded(model, rows)
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
    return {"seconds": median(seconds[1:]), "cpu_seconds": median(cpu[1:]), "memory_mb": memory.grown_mb}


def measure_vocabulary(vocab_size: int, tokens: int, *, scores: bool) -> float:
    """Returns the megabytes of a pass over one row: of the model alone, or with the logprobs of all its tokens."""
    model = Decoder(config_of(vocab_size, tokens)).initialize(0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids_N = torch.randint(0, vocab_size, (tokens,), generator=torch.Generator().manual_seed(0))
    memory = Memory()
    hidden_NE = model.hidden_states(ids_N, PackedLayout([tokens]))
    if scores:
        score_targets(hidden_NE, model.head_weight, ids_N).logp_N.sum().backward()
    else:
        hidden_NE.square().sum().backward()
    return memory.grown_mb


def aside(arguments: Sequence[str]) -> dict[str, float]:
    """Returns the result of this file in a process of its own."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip() or f"{' '.join(command)} failed")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def compare(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Compares the sides, a line each."""
    rows = Rows.draw(options.group, options.prompt, options.words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model_folder(Decoder(config_of(options.words, options.prompt + 128)).initialize(0), folder)
        print(
            f"logprobs and gradients of the sides differ by {check(folder, options.words, trl=options.trl):.1e} at most"
        )
        sizes = ["--group", str(options.group), "--prompt", str(options.prompt), "--repeats", str(options.repeats)]
        results = {side: aside([*sizes, "--side", side, "--folder", name]) for side in SIDES}
        for side in TRL_SIDES if options.trl else ():
            results[side] = run_trl(side, folder, rows, repeats=options.repeats)
    print(f"{options.group} rows, {options.prompt} tokens of prompt, {rows.num_trained} trained tokens")
    for side, measured in results.items():
        measured["trained_tokens_per_s"] = rows.num_trained / measured["seconds"]
        measured["times_slower"] = measured["seconds"] / results["shared"]["seconds"]
        numbers = f"{measured['seconds']:7.3f} s {measured['cpu_seconds']:7.3f} CPU s"
        numbers += f"  {measured['trained_tokens_per_s']:7,.0f} trained tokens/s  {measured['memory_mb']:7,.0f} MB"
        print(f"{side:11}{numbers}  {measured['times_slower']:.2f}x the time of shared")
    return results


def parse() -> argparse.Namespace:
    """Parses the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, default=16, help="rows that share their prompt")
    parser.add_argument("--prompt", type=int, default=1000, help="its tokens")
    parser.add_argument("--words", type=int, default=1984, help="vocabulary of the model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, help="measure the memory of logprobs over so many words instead")
    parser.add_argument("--tokens", type=int, default=8000, help="of the row that is measured with --vocabulary")
    parser.add_argument("--trl", action=argparse.BooleanOptionalAction, default=True, help="measure TRL too")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--side", choices=(*SIDES, "model", "scores"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measures, or is one side of a measurement."""
    options = parse()
    torch.set_num_threads(1)
    report: object
    if options.side in SIDES:
        rows = Rows.draw(options.group, options.prompt, options.words)
        print(json.dumps(time_side(options.side, options.folder, rows, options.repeats)))
        return
    if options.side:
        memory_mb = measure_vocabulary(options.vocabulary, options.tokens, scores=options.side == "scores")
        print(json.dumps({"memory_mb": memory_mb}))
        return
    if options.vocabulary:
        sizes = ["--vocabulary", str(options.vocabulary), "--tokens", str(options.tokens)]
        model_mb, scores_mb = (aside([*sizes, "--side", side])["memory_mb"] for side in ("model", "scores"))
        whole_mb = options.vocabulary * options.tokens * 4 / 2**20
        print(f"{options.tokens} tokens, {options.vocabulary} words: whole logits would be {whole_mb:,.0f} MB")
        print(f"the model alone {model_mb:,.0f} MB, with logprobs {scores_mb:,.0f} MB: {scores_mb / model_mb:.2f}x")
        report = {"model_mb": model_mb, "scores_mb": scores_mb, "ratio": scores_mb / model_mb}
    else:
        report = compare(options)
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
