"""`agentgym sft`: a model learns to say what a policy says, and becomes a model folder."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated

import tyro

import agentgym
from agentgym.chat_templates.families import renderer_for
from agentgym.cli.environment import load_env
from agentgym.cli.options import parse_options
from agentgym.cli.terminal import fail, progress, say, show_json
from agentgym.engines.hf_checkpoint import load_decoder
from agentgym.envs.policies import policy_for
from agentgym.envs.seeds import EVAL_SEED_START
from agentgym.errors import AgentGymError
from agentgym.evaluation.eval_folder import free_folder
from agentgym.evaluation.model_folder import EMBEDDED, model_folder
from agentgym.rollout.seeds import derive
from agentgym.trainers.demonstrations import DemonstrationConfig
from agentgym.trainers.optimizer import OptimizerConfig
from agentgym.trainers.sft import ImitationConfig, ImitationStep, imitate
from agentgym.trainers.sft_folder import SftFolder
from agentgym.types import JSON

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class SftOptions:
    """Trains a model on demonstrations: a policy plays, and the model learns to say what it said."""

    env: str
    """Environment id, package.module:Class or path/to/file.py:Class."""
    env_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    """Keywords of the environment's class, such as level=2."""
    model: str = EMBEDDED
    """The model to begin with: `embedded`, or a folder with a model and its tokenizer."""
    policy: str = "oracle"
    """The player to imitate; `oracle` is what the environment's make_oracle gives."""
    mistakes: float = 0.25
    """Share of turns at which a random move is played instead, so that the model sees what comes after mistakes."""
    learn_mistakes: bool = False
    """Imitate the random moves too."""
    steps: int = ImitationConfig.steps
    """Optimizer steps."""
    episodes: int = ImitationConfig.episodes
    """Demonstrations a step; every one is a new task."""
    threads: int = ImitationConfig.threads
    """Threads that share a step's demonstrations; part of the recipe, as sums depend on it in their last bits."""
    optimizer: OptimizerConfig = field(default_factory=lambda: ImitationConfig().optimizer)
    seed: int = 0
    """Tasks and mistakes follow from it; held-out tasks are never among them."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """The folder for the model; by default a new one under runs/."""
    json: bool = False
    """End with one line of JSON."""

    @property
    def imitation(self) -> ImitationConfig:
        """What `imitate` is told."""
        shown = DemonstrationConfig(policy=self.policy, mistakes=self.mistakes, learn_mistakes=self.learn_mistakes)
        return ImitationConfig(
            demonstrations=shown,
            optimizer=self.optimizer,
            steps=self.steps,
            episodes=self.episodes,
            threads=self.threads,
        )


class _Display:
    """Counts the steps on the screen, and keeps what the last lines tell."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.imitated_tokens = 0
        self.won = self.elapsed_s = 0.0
        self.first_loss = self.loss = float("nan")

    @property
    def tokens_per_s(self) -> float:
        """Ids of demonstrations a second, playing included."""
        return self.tokens / max(self.elapsed_s, 1e-9)

    def note(self, step: ImitationStep) -> str:
        """Takes in a step; gives what stands beside the bar."""
        if not self.steps:
            self.first_loss = step.loss
        self.steps, self.loss, self.elapsed_s = step.step, step.loss, step.elapsed_s
        self.tokens += step.tokens
        self.imitated_tokens += step.imitated_tokens
        self.won += step.success
        return f"loss {step.loss:.4f}  {self.tokens_per_s:,.0f} tokens/s"


def main(args: Sequence[str]) -> int:
    """Runs `agentgym sft ...`; an interrupted run saves what was learned and has the exit code 130."""
    options = parse_options(SftOptions, args, prog="agentgym sft")
    config = options.imitation
    env = load_env(options.env, options.env_kwargs)
    policy_for(env, options.policy)
    source = model_folder(options.model)
    renderer, model = renderer_for(source), load_decoder(source)
    folder = SftFolder(options.output or _free_output(options), _settings(options))
    display = _Display()
    interrupted = False
    try:
        with progress("steps", config.steps) as count, _interrupted_between_steps() as check:

            def on_step(step: ImitationStep) -> None:
                folder.write_metrics(step)
                count(display.note(step))
                check()

            imitate(model, renderer, [env], config, first_seed=_first_seed(options.seed), on_step=on_step)
    except KeyboardInterrupt:
        interrupted = True
    except AgentGymError:
        say(f"what was learned in {display.steps} steps is in {folder.path}")
        raise
    finally:
        env.close()
        folder.save_model(model, source)
    _show(options, folder, display, interrupted=interrupted)
    return 130 if interrupted else 0


@contextmanager
def _interrupted_between_steps() -> Iterator[_Check]:
    """Holds Ctrl-C back until `check` is called, so that no step is left half done; a second Ctrl-C does not wait."""
    check = _Check()
    before = signal.signal(signal.SIGINT, check.on_signal)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


class _Check:
    def __init__(self) -> None:
        self._asked = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def __call__(self) -> None:
        if self._asked:
            raise KeyboardInterrupt


def _free_output(options: SftOptions) -> Path:
    stem = Path(options.env.rpartition(":")[2]).name
    return free_folder(Path("runs") / f"{stem}-sft-seed{options.seed}")


def _first_seed(seed: int) -> int:
    """Where the tasks of a run begin: far enough below the held-out ones."""
    return derive(seed, "sft") % (EVAL_SEED_START // 2)


def _settings(options: SftOptions) -> dict[str, JSON]:
    given = asdict(options)
    del given["output"], given["json"]
    plain: dict[str, JSON] = json.loads(json.dumps({"kind": "sft", "agentgym": agentgym.__version__, **given}))
    return plain


def _show(options: SftOptions, folder: SftFolder, display: _Display, *, interrupted: bool) -> None:
    path = folder.path
    say(f"loss {display.first_loss:.4f} -> {display.loss:.4f} in {display.steps} steps, {display.elapsed_s:.0f} s")
    shown = f"{display.steps * options.episodes} demonstrations by {options.policy}"
    success = display.won / max(1, display.steps)
    say(f"{shown}, success {success:.3f}: {display.imitated_tokens:,} of {display.tokens:,} tokens imitated")
    say(f"model: {path}")
    keywords = "".join(f" {name}={json.dumps(value)}" for name, value in options.env_kwargs.items())
    play = f"--env {options.env}" + (f" --env-kwargs{keywords}" if keywords else "")
    if interrupted:
        fail(f"interrupted after step {display.steps} of {options.steps}; what was learned is in {path}")
    else:
        say(f"try next: agentgym eval {play} --policy {path}")
        say(f"          agentgym train {play} --model {path}")
    if options.json:
        found: dict[str, JSON] = {
            "output": str(path),
            "steps": display.steps,
            "loss_first": display.first_loss if display.steps else None,
            "loss": display.loss if display.steps else None,
            "tokens": display.tokens,
            "imitated_tokens": display.imitated_tokens,
            "demonstration_success": success,
            "elapsed_s": round(display.elapsed_s, 2),
            "interrupted": interrupted,
        }
        show_json(found)
