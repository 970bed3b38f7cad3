"""DPO and on-policy distillation: the numbers of TRL on the same rows, and what both teach the embedded model.

Pairs are the best and the worst recorded episode of a task, rows are recorded episodes, both by their exact ids. TRL
(`DPOTrainer`, and the loss of `GKDTrainer`) lives in an environment of its own that the first run makes.

    python benchmarks/teaching.py agree [--run runs/RUN]      # losses and gradient norms of both, side by side
    python benchmarks/teaching.py curves [--seeds 0 1 2]      # held-out success before and after, three seeds

`agree` plays a run of four steps if none is given. `curves` distills the embedded model from one that `agentgym train`
has brought to 0.95, and lets it learn from pairs of the episodes of its own first steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peer_environments import run_beside_trl

from agentgym.chat_templates import renderer_for
from agentgym.embedded import embedded_folder
from agentgym.model.model_folder import load_decoder
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.algorithms.losses import PreferenceForm
from agentgym.trainers.checkpoints.checkpoint import checkpoint_folders
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.learner.reference import FinalStates, whole_divergence
from agentgym.trainers.lessons.batches import pair_batch
from agentgym.trainers.lessons.demonstrations import Pair
from agentgym.trainers.lessons.pairs import pairs_of_episodes
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

LOSSES: tuple[PreferenceForm, ...] = ("sigmoid", "ipo", "hinge")
BETAS = (0.0, 0.5, 1.0)
BETA, LEARNING_RATE = 0.1, 1e-4
MAX_PAIRS = 8
TRAIN = ("train", "--env", "TextGame-v0", "--target-success", "None")


def agentgym(*words: object) -> None:
    """Runs a command of the package, whose output goes to standard error."""
    command = [sys.executable, "-m", "agentgym", *map(str, words)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def split(pair: Pair) -> dict[str, list[int]]:
    """Returns the ids of a pair as TRL takes them: all after the shared prompt is the reply."""
    both = [list(row.ids) for row in (pair.chosen, pair.rejected)]
    shared = next(place for place, (better, worse) in enumerate(zip(*both, strict=False)) if better != worse)
    return {"prompt_ids": both[0][:shared], "chosen_ids": both[0][shared:], "rejected_ids": both[1][shared:]}


def with_whole_replies(pair: Pair) -> Pair:
    """Returns the pair with all ids after the shared prompt learned, as TRL does."""
    rows = []
    num_prompt = len(split(pair)["prompt_ids"])
    for row in (pair.chosen, pair.rejected):
        mask = tuple(place >= num_prompt for place in range(len(row.ids)))
        rows.append(type(row)(row.ids, mask, row.success))
    return Pair(*rows)


def our_dpo(pairs: Sequence[Pair], loss: PreferenceForm) -> dict[str, list[float]]:
    """Returns losses and gradient norms of two steps on all pairs."""
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, betas=(0.9, 0.999), warmup_steps=0)
    config = LearnerConfig(loss="preference", loss_settings={"form": loss, "beta": BETA})
    learner = Learner(load_decoder(embedded_folder()), config, optimizer, total_steps=2)
    steps = [learner.update(pair_batch(pairs), version=version) for version in range(2)]
    learner.close()
    return {"losses": [step.loss for step in steps], "grad_norms": [step.grad_norm for step in steps]}


def our_gkd(rows: Sequence[dict[str, Any]], teacher_folder: Path, beta: float) -> dict[str, float]:
    """Returns the loss over the replies of the rows, and the norm of its gradient."""
    student, teacher = load_decoder(embedded_folder()), load_decoder(teacher_folder)
    ids_N = torch.tensor([i for row in rows for i in row["ids"][:-1]])
    mask_N = torch.tensor([flag for row in rows for flag in row["mask"][1:]])
    lengths = [len(row["ids"]) - 1 for row in rows]
    with torch.no_grad():
        teacher_states = teacher(
            ids_N, PackedLayout(lengths, ids_N=ids_N, mask_N=mask_N), lambda *states: FinalStates(*states, None)
        )

    def compare(hidden_ME: torch.Tensor, head_VE: torch.Tensor) -> torch.Tensor:
        return whole_divergence(FinalStates(hidden_ME, head_VE, None), teacher_states, beta, 1.0)

    divergence_M: torch.Tensor = student(ids_N, PackedLayout(lengths, ids_N=ids_N, mask_N=mask_N), compare)
    loss = divergence_M.mean()
    slopes = torch.autograd.grad(loss, list(student.parameters()))
    return {"loss": float(loss.detach()), "grad_norm": float(torch.stack([slope.norm() for slope in slopes]).norm())}


def agree(run: Path) -> None:
    """Prints the numbers of both sides."""
    renderer, model = renderer_for(embedded_folder()), load_decoder(embedded_folder())
    pair_set = pairs_of_episodes([run], renderer, model.vocab_size, model.context_window)
    pairs = [with_whole_replies(pair) for pair in pair_set.pairs[:MAX_PAIRS]]
    rows = [{"ids": list(pair.chosen.ids), "mask": list(pair.chosen.mask)} for pair in pair_set.pairs[:MAX_PAIRS]]
    teacher = checkpoint_folders(run)[-1]
    spec = {
        "student": str(embedded_folder()),
        "teacher": str(teacher),
        "pairs": [split(pair) for pair in pairs],
        "rows": rows,
        "losses": LOSSES,
        "betas": BETAS,
        "beta": BETA,
        "learning_rate": LEARNING_RATE,
    }
    theirs = run_beside_trl(Path(__file__).with_name("teaching_trl.py"), spec)
    print(f"{len(pairs)} pairs, {sum(pair.num_tokens for pair in pairs)} tokens")
    for loss in LOSSES:
        ours = our_dpo(pairs, loss)
        for name in ("losses", "grad_norms"):
            numbers = "   ".join(f"{a:.6f} {b:.6f}" for a, b in zip(ours[name], theirs["dpo"][loss][name], strict=True))
            print(f"DPO {loss:8} {name:10} of two steps, ours and TRL's: {numbers}")
    for beta in BETAS:
        mine, numbers = our_gkd(rows, teacher, beta), theirs["gkd"][str(beta)]
        pairs_of_numbers = "   ".join(f"{mine[name]:.6f} {numbers[name]:.6f}" for name in ("loss", "grad_norm"))
        print(f"GKD beta {beta}: loss and gradient norm, ours and TRL's: {pairs_of_numbers}")


def success(run: Path, policy: Path | str) -> float:
    """Returns the success of a model on 200 held-out tasks."""
    agentgym("eval", "--env", "TextGame-v0", "-n", 200, "--policy", policy, "--output", run)
    result = json.loads((run / "result.json").read_text())
    return float(result["success"])


def curves(seeds: Sequence[int], folder: Path) -> None:
    """Prints a line for each seed: held-out success before and after pairs, and from a teacher."""
    teacher = folder / "teacher"
    if not teacher.exists():
        agentgym("train", "--env", "TextGame-v0", "--seed", 9, "--output", teacher)
    best = checkpoint_folders(teacher)[-1]
    for seed in seeds:
        played, preferred, distilled = (folder / f"{name}{seed}" for name in ("played", "preferred", "distilled"))
        rate = ("--optimizer.learning-rate", "1e-9")  # the episodes of the untrained model
        sizes = ("--steps", 8, "--tasks", 32, "--group-size", 8, "--eval.episodes", 0, "--seed", seed)
        agentgym(*TRAIN, *sizes, *rate, "--output", played)
        words = ("--episodes", played, "--pairs-per-task", 2, "--epochs", 2, "--batch-size", 16, "--seed", seed)
        agentgym("dpo", *words, "--optimizer.learning-rate", "2e-4", "--sft-weight", 0.2, "--output", preferred)
        kl = ("--learner.kl.reference", best, "--learner.kl.coefficient", 1, "--learner.kl.penalty", "jsd")
        sizes = ("--steps", 16, "--tasks", 16, "--group-size", 2, "--eval.episodes", 200, "--eval.every", 4)
        agentgym(*TRAIN, "--algo", "distill", *kl, *sizes, "--seed", seed, "--output", distilled)
        lines = [json.loads(line) for line in (distilled / "metrics.jsonl").read_text().splitlines()]
        held_out = [f"{line['eval_success']:.3f}" for line in lines if "eval_success" in line]
        after = success(folder / f"eval-distilled{seed}", checkpoint_folders(distilled)[-1])
        before = success(folder / f"eval-embedded{seed}", "embedded")
        dpo = success(folder / f"eval-preferred{seed}", preferred)
        print(f"seed {seed}: DPO {before:.3f} -> {dpo:.3f}; distilled {' '.join(held_out)} {after:.3f}", flush=True)


def main() -> None:
    """Runs the part that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["agree", "curves"])
    parser.add_argument("--run", type=Path, help="a training run, whose episodes are the rows of `agree`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("runs/teaching"))
    arguments = parser.parse_args()
    if arguments.part == "curves":
        curves(arguments.seeds, arguments.output)
        return
    with tempfile.TemporaryDirectory() as scratch:
        run = arguments.run or Path(scratch, "run")
        if arguments.run is None:
            agentgym(*TRAIN, "--steps", 4, "--eval.episodes", 0, "--output", run)
        agree(run)


if __name__ == "__main__":
    main()
