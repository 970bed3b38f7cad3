"""`agentgym dpo`: trains a model on pairs of a better and a worse reply, and writes it as a model folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.cli.lessons.lesson import (
    LessonOptions,
    Pupil,
    interrupted_hint,
    open_folder,
    open_lesson,
    open_pupil,
    play_options,
    read_lesson,
    recorded_settings,
    run_lesson,
    run_steps,
    with_lora_seed,
)
from agentgym.cli.run_folder import own_code_options
from agentgym.cli.terminal import fail, say, show_json
from agentgym.errors import ConfigError, RunFolderError
from agentgym.evaluation.play.eval_folder import free_folder
from agentgym.trainers.algorithms.losses import PreferenceForm
from agentgym.trainers.preferences.loop import (
    PreferenceConfig,
    PreferenceStep,
    learn_preferences,
)
from agentgym.trainers.preferences.pairs import PairSet, pairs_of_episodes, pairs_of_files
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.sft.lesson import Validation, passes
from agentgym.trainers.sft.sft_folder import SftFolder
from agentgym.trainers.trackers.tracking import Tracking
from agentgym.types import JSON

if TYPE_CHECKING:
    from agentgym.trainers.parallel.ranks import Ranks  # takes a second, and most lessons have none

__all__ = ["main"]

DEFAULTS = PreferenceConfig()


@dataclass(frozen=True, kw_only=True)
class _DpoSources:
    """The options that come first: those that name what is learned from."""

    pairs: tuple[str, ...] = ()
    """Files (.jsonl, .parquet; at an address such as s3://bucket/rows.jsonl too) whose rows have `chosen` and
    `rejected`, and `prompt` unless both begin with it: texts or OpenAI's messages, and `tools` where there are any."""
    episodes: tuple[str, ...] = ()
    """Run folders: the best episode of a task with the worst, by their exact ids."""
    validation: tuple[str, ...] = ()
    """Files or run folders like those that are learned, whose loss and accuracy are measured after every pass."""
    pairs_per_task: int = 1
    """The most pairs of a task's episodes: best and worst, second best and second worst, ..."""


@dataclass(frozen=True, kw_only=True)
class DpoOptions(LessonOptions, _DpoSources):
    """Trains a model to prefer better replies over worse ones to the same prompts (direct preference optimization).
    Name --pairs or --episodes."""

    loss: PreferenceForm = DEFAULTS.loss
    """`sigmoid` is DPO (Rafailov et al. 2023), `ipo` a squared distance to a fixed margin (Azar et al. 2023), `hinge`
    SLiC's (Zhao et al. 2023)."""
    beta: float = DEFAULTS.beta
    """The weight of the divergence from the first weights; less moves further from them."""
    label_smoothing: float = DEFAULTS.label_smoothing
    """The share of pairs whose order is taken for wrong (conservative DPO), in [0, 0.5)."""
    sft_weight: float = DEFAULTS.sft_weight
    """The weight of the negative log likelihood of the better reply, per token, beside the loss."""
    steps: int | None = None
    """Optimizer steps; by default as many as --epochs asks for."""
    epochs: int = 1
    """Passes over the pairs, each in another order."""
    batch_size: int = DEFAULTS.batch_size
    """Pairs a step."""
    optimizer: OptimizerConfig = field(default_factory=lambda: PreferenceConfig().optimizer)
    seed: int = 0
    """The orders of the passes follow from it."""

    def check(self) -> None:
        """Raises ConfigError or RunFolderError for options that do not go together."""
        if bool(self.pairs) == bool(self.episodes):
            raise ConfigError("one source is learned from: --pairs FILE or --episodes RUN")
        for name in ("epochs", "batch_size", "pairs_per_task"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for path in map(Path, (*self.episodes, *(self.validation if self.episodes else ()))):
            if not path.exists():
                raise RunFolderError(f"there is no run folder {str(path)!r}")

    def learning(self, num_pairs: int) -> PreferenceConfig:
        """Returns the settings of learning from so many pairs."""
        return PreferenceConfig(
            loss=self.loss,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            sft_weight=self.sft_weight,
            optimizer=self.optimizer,
            steps=-(-self.epochs * num_pairs // self.batch_size) if self.steps is None else self.steps,
            batch_size=self.batch_size,
            learner=with_lora_seed(self.learner, self.seed),
        )


def main(args: Sequence[str]) -> int:
    """Runs `agentgym dpo ...`; an interrupted run saves what was learned and has the exit code 130."""
    options = read_lesson(DpoOptions, args, "dpo")
    options.check()
    options.learning(1)  # refuses invalid settings before anything is read
    return run_lesson(options, _run)


def _run(options: DpoOptions, ranks: Ranks | None, tracking: Tracking) -> int:
    pupil = open_pupil(options, ranks)
    found = _read(options, options.pairs or options.episodes, pupil)
    config = options.learning(len(found.pairs)).with_optimizer(pupil.model)
    validation = None
    if options.validation:
        every = -(-len(found.pairs) // options.batch_size)
        validation = Validation(_read(options, options.validation, pupil).pairs, every)
    named = Path([*options.pairs, *options.episodes][0]).resolve().stem
    path = options.output or free_folder(Path("runs") / f"{named}-dpo-seed{options.seed}")
    given = asdict(replace(options, optimizer=config.optimizer)) | pupil.chat_format | {"steps": config.steps}
    folder = open_folder(path, recorded_settings("dpo", given), options, ranks, tracking)
    state = open_lesson(options, config, pupil, folder, ranks)
    seen = [PreferenceStep(**line) for line in folder.recorded]

    def learn_pairs(on_step: Callable[[PreferenceStep], None]) -> None:
        pairs = islice(passes(found.pairs, options.seed), state.num_done * options.batch_size, None)
        learn_preferences(state, pairs, config, validation=validation, on_step=on_step)

    def note(step: PreferenceStep) -> str:
        seen.append(step)
        return f"loss {step.loss:.4f}  accuracy {step.accuracy:.2f}  margin {step.margin:.2f}"

    interrupted = run_steps(pupil, state, folder, config.steps, learn_pairs, note)
    _show(options, found, folder, seen, interrupted=interrupted)
    return 130 if interrupted else 0


def _read(options: DpoOptions, paths: Sequence[str], pupil: Pupil) -> PairSet:
    """Reads files of pairs or run folders; prints what was left out, and why."""
    if options.pairs:
        found = pairs_of_files(paths, pupil.renderer, pupil.model.context_window)
    else:
        sizes = (pupil.model.vocab_size, pupil.model.context_window)
        found = pairs_of_episodes([*map(Path, paths)], pupil.renderer, *sizes, per_task=options.pairs_per_task)
    for line in found.report:
        say(line)
    return found


def _show(
    options: DpoOptions, found: PairSet, folder: SftFolder, seen: Sequence[PreferenceStep], *, interrupted: bool
) -> None:
    numbers: dict[str, JSON] = {"output": str(folder.path), "steps": len(seen), "pairs": len(found.pairs)}
    if seen:
        first, last = seen[0], seen[-1]
        say(f"loss {first.loss:.4f} -> {last.loss:.4f}, accuracy {last.accuracy:.2f}, margin {last.margin:.2f}")
        say(f"{len(seen)} steps of {options.batch_size} of {len(found.pairs)} pairs, {last.elapsed_s:.0f} s")
        numbers |= {"loss_first": first.loss, "loss": last.loss, "accuracy": last.accuracy, "margin": last.margin}
        if last.validation_loss is not None:
            say(f"validation loss {last.validation_loss:.4f}, accuracy {last.validation_accuracy:.2f}")
            numbers |= {"validation_loss": last.validation_loss, "validation_accuracy": last.validation_accuracy}
    say(f"model: {folder.path}")
    if interrupted:
        fail(f"interrupted after step {len(seen)}; {interrupted_hint('dpo', folder)}")
    else:
        own = own_code_options(options.family, options.model_backend)
        say(f"try next: agentgym eval {play_options(found.task)} --policy {folder.path}{own}")
    if options.json:
        show_json({**numbers, "interrupted": interrupted})
