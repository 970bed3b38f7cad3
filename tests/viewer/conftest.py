"""A recorded run of a small text game: 12 steps of 4 episodes and two evaluations, hostile text included."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\u202e"
PIECES = re.compile(r"<\|\w+\|>|</?tool_\w+>|\s?\w+|\s|[^\w\s]")
PROMPT = (
    "<|im_start|>system\nYou are in a text world. # Tools\n{}<|im_end|>\n"
    "<|im_start|>user\nYou stand in a small kitchen. There is a door to the north. Find the lamp.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
ANSWER = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


class Vocabulary:
    """A growing vocabulary of word pieces; its `text` is the `decode_token` of the run."""

    def __init__(self) -> None:
        self.pieces: list[str] = ["\\xe2\\x82"]

    def ids(self, text: str) -> list[int]:
        for piece in (pieces := PIECES.findall(text)):
            if piece not in self.pieces:
                self.pieces.append(piece)
        return [self.pieces.index(piece) for piece in pieces]

    def text(self, token_id: int) -> str:
        return self.pieces[token_id]


def turn_of(direction: str, number: int, malformed: bool) -> dict[str, object]:
    """One line of a turn's record, its reward still 0."""
    call: dict[str, object] = {"id": f"call_{number}", "name": "go", "arguments": {"direction": direction}}
    error = None
    if malformed:
        call = {"id": f"call_{number}", "raw": f'{{"name": "go", {direction}', "error": "Expecting ','"}
        error = "malformed"
    text = f"You walk {direction}. It is dark. {HOSTILE if number == 1 else ''}"
    return {
        "message": {"role": "assistant", "content": "I look.", "reasoning": None, "tool_calls": [call]},
        "reward": 0.0,
        "observation": text,
        "tool_results": [{"call_id": f"call_{number}", "name": "go", "content": text, "error": error}],
        "finish_reason": "stop",
    }


def episode(vocabulary: Vocabulary, rng: random.Random, step: int, member: int, phase: str) -> dict[str, object]:
    """One line of episodes.jsonl: two to five turns, now and then a malformed call or a broken environment."""
    failed = phase == "train" and rng.random() < 0.06
    win = rng.random() < (step + 2) / 16
    turns = [turn_of(rng.choice(["north", "south"]), n, rng.random() < 0.1) for n in range(rng.randint(2, 5))]
    turns[-1]["reward"] = None if failed else float(win)
    spans: list[dict[str, object]] = [{"source": "prompt", "ids": vocabulary.ids(PROMPT)}]
    num_sampled = 0
    for turn in turns:
        call = json.dumps(turn["message"]["tool_calls"][0])  # type: ignore[index]
        ids = [*vocabulary.ids(f"I look.\n<tool_call>\n{call}\n</tool_call>"), 0, *vocabulary.ids("<|im_end|>")]
        logprobs = [-abs(rng.gauss(0, 0.7)) for _ in ids]
        spans.append({"source": "policy", "ids": ids, "logprobs": logprobs, "policy_versions": [step] * len(ids)})
        num_sampled += len(ids)
        if turn is not turns[-1]:
            spans.append({"source": "env", "ids": vocabulary.ids(ANSWER.format(turn["observation"]))})
    return {
        "phase": phase, "step": step, "group": f"{step}/{member // 2}", "member": member % 2,
        "task": {"env_id": "TextGame-v0", "seed": step, "options": {}, "kwargs": {"level": 2}},
        "status": "env_error" if failed else "completed", "stop_reason": "env_error" if failed else "terminated",
        "reward": None if failed else float(win), "success": None if failed else win,
        "metrics": {} if failed else {"success": float(win), "steps_over_optimal": 2.0},
        "error": f"TextGame-v0: KeyError: 'lamp' {HOSTILE}" if failed else None, "info": {"seen": HOSTILE},
        "rows": [{"spans": spans}], "turns": turns,
        "advantages": None if failed or phase != "train" else [[round(rng.gauss(0, 1), 3)] * num_sampled],
    }  # fmt: skip


def metrics_of(rng: random.Random, step: int, num_steps: int) -> dict[str, object]:
    """One line of metrics.jsonl; the gradient norm of step 3 is not a number."""
    rate = min(1, step / num_steps + 0.1 * rng.random())
    return {
        "step": step, "loss": rng.gauss(0, 0.02), "reward_mean": rate, "success": rate, "episodes": 4,
        "trained_tokens": 300 + step, "dead_groups": rng.randint(0, 2), "entropy": 1.2 - step / (2 * num_steps),
        "kl": 0.001 * step, "clip_fraction": 0.0, "grad_norm": float("nan") if step == 3 else rng.random(),
        "lr": 1e-4, "malformed_calls": rng.randint(0, 3), "generate_s": 1.5, "update_s": 1.0, "elapsed_s": 3.0 * step,
    }  # fmt: skip


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary()


@pytest.fixture
def make_run(tmp_path: Path, vocabulary: Vocabulary) -> Callable[..., Path]:
    """`make_run(num_steps=12, per_step=4)` writes a run folder and returns it."""

    def make(num_steps: int = 12, per_step: int = 4) -> Path:
        rng = random.Random(5)
        lines = [episode(vocabulary, rng, 0, member, "eval_before") for member in range(4)]
        lines += [
            episode(vocabulary, rng, step, member, "train") for step in range(num_steps) for member in range(per_step)
        ]
        lines += [episode(vocabulary, rng, num_steps, member, "eval_after") for member in range(4)]
        metrics = [metrics_of(rng, step, num_steps) for step in range(num_steps)]
        run = tmp_path / "lamp-run"
        run.mkdir()
        (run / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics), encoding="utf-8")
        return run

    return make
