"""`agentgym sft`: trains a model to imitate recorded replies, and writes it as a model folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.cli.environment import load_env
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
from agentgym.envs.base.policies import policy_for
from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.envs.base.text_env import TextEnv
from agentgym.errors import ConfigError, RunFolderError
from agentgym.evaluation.play.eval_folder import free_folder
from agentgym.rollout.seeds import derive
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.sft.demonstrations import Demonstration, DemonstrationConfig, stream
from agentgym.trainers.sft.lesson import Validation, passes
from agentgym.trainers.sft.loop import ImitationConfig, ImitationStep, learn
from agentgym.trainers.sft.sft_folder import SftFolder
from agentgym.trainers.sft.sft_rows import ConversationSource, EpisodeSource, SftRows
from agentgym.trainers.trackers.tracking import Tracking
from agentgym.types import JSON, Task

if TYPE_CHECKING:
    from agentgym.trainers.parallel.ranks import Ranks  # takes a second, and most lessons have none

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class _SftSources:
    """The options that come first: those that name what is learned from."""

    env: str | None = None
    """Demonstrations of this environment: its id, package.module:Class or path/to/file.py:Class."""
    env_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    """Keywords of the environment's class, such as level=2."""
    conversations: tuple[str, ...] = ()
    """Files (.jsonl, .parquet; at an address such as s3://bucket/rows.jsonl too) whose rows have OpenAI's `messages`,
    and `tools` where there are any."""
    episodes: tuple[str, ...] = ()
    """Run folders whose recorded episodes are learned, by their exact ids: those that succeeded, or by --min-reward."""
    validation: tuple[str, ...] = ()
    """Files or run folders like those of --conversations or --episodes, whose loss is measured after every pass."""


@dataclass(frozen=True, kw_only=True)
class SftOptions(LessonOptions, _SftSources):
    """Trains a model to imitate the replies of a policy that plays, of conversations from files, or of good recorded
    episodes. Name one of --env, --conversations and --episodes."""

    policy: str = "oracle"
    """The player to imitate; `oracle` is what the environment's make_oracle gives."""
    mistakes: float = 0.25
    """Share of turns at which a random move is played instead, so that the model sees what comes after mistakes."""
    learn_mistakes: bool = False
    """Imitate the random moves too."""
    skip_malformed: bool = False
    """Leave out conversations that are malformed, or that the chat format cannot express; else one stops the run."""
    min_reward: float | None = None
    """The least reward of an episode that is learned; None goes by success."""
    best_per_task: int | None = None
    """The most episodes of each task that are learned, those with the greatest rewards."""
    steps: int | None = None
    """Optimizer steps; by default 500 of demonstrations, else as many as --epochs asks for."""
    epochs: int = 3
    """Passes over conversations or episodes, each in another order."""
    batch_size: int = ImitationConfig.batch_size
    """Demonstrations, or rows, a step; every demonstration is a new task."""
    optimizer: OptimizerConfig = field(default_factory=lambda: ImitationConfig().optimizer)
    seed: int = 0
    """Tasks, mistakes and orders follow from it; demonstrations are never of held-out tasks."""

    def check(self) -> None:
        """Raises ConfigError or RunFolderError for options that do not go together."""
        given = [name for name in SOURCES if getattr(self, name)]
        if len(given) != 1:
            got = "got none" if not given else f"got {' and '.join(f'--{name}' for name in given)}"
            raise ConfigError(
                "one source is learned from: --env ID (demonstrations), --conversations FILE or --episodes RUN; " + got
            )
        for name, (source, default) in BELONGS.items():
            if source not in given and getattr(self, name) != default:
                raise ConfigError(f"--{name.replace('_', '-')} goes with --{source}, and not with --{given[0]}")
        if self.validation and self.env:
            raise ConfigError("--validation goes with --conversations or --episodes: demonstrations are always new")
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for path in map(Path, (*self.episodes, *(self.validation if self.episodes else ()))):
            if not path.exists():
                hint = f"; for so many demonstrations a step, --batch-size {path}" if path.name.isdigit() else ""
                raise RunFolderError(f"there is no run folder {str(path)!r}{hint}")

    def imitation(self, steps: int) -> ImitationConfig:
        """Returns the settings of `learn`."""
        return ImitationConfig(
            demonstrations=self.demonstrations,
            optimizer=self.optimizer,
            steps=steps,
            batch_size=self.batch_size,
            learner=with_lora_seed(self.learner, self.seed),
        )

    @property
    def demonstrations(self) -> DemonstrationConfig:
        """The settings of the player of the demonstrations."""
        return DemonstrationConfig(policy=self.policy, mistakes=self.mistakes, learn_mistakes=self.learn_mistakes)


SOURCES = ("env", "conversations", "episodes")
BELONGS = {
    "env_kwargs": ("env", {}),
    "policy": ("env", "oracle"),
    "mistakes": ("env", 0.25),
    "learn_mistakes": ("env", False),
    "skip_malformed": ("conversations", False),
    "min_reward": ("episodes", None),
    "best_per_task": ("episodes", None),
}
"""Options that only one source has: the source and the default."""


@dataclass(frozen=True)
class _Lesson:
    """The rows or demonstrations to learn, and for how long."""

    shown_after: Callable[[int], Iterator[Demonstration]]
    """Returns those after so many."""
    config: ImitationConfig
    env: TextEnv | None = None
    task: Task | None = None
    """A task to try the model on."""
    num_rows: int = 0
    """The number of rows that are repeated in every epoch; 0 for demonstrations, which are always new."""
    validation: Validation[Demonstration] | None = None


class _Display:
    """Counts the steps on the screen, and keeps the numbers of the last lines."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.imitated_tokens = 0
        self.elapsed_s = 0.0
        self._success: list[float] = []
        self.first_loss = self.loss = float("nan")
        self.validation_loss: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """The tokens of demonstrations a second, playing included."""
        return self.tokens / max(self.elapsed_s, 1e-9)

    @property
    def success(self) -> float | None:
        """The share of the demonstrations that succeeded; None if unknown."""
        return sum(self._success) / len(self._success) if self._success else None

    def note(self, step: ImitationStep) -> str:
        """Records a step; returns the text next to the bar."""
        if not self.steps:
            self.first_loss = step.loss
        self.steps, self.loss, self.elapsed_s = step.step, step.loss, step.elapsed_s
        self.tokens += step.tokens
        self.imitated_tokens += step.imitated_tokens
        if step.validation_loss is not None:
            self.validation_loss = step.validation_loss
        if step.success is not None:
            self._success.append(step.success)
        return f"loss {step.loss:.4f}  {self.tokens_per_s:,.0f} tokens/s"


def main(args: Sequence[str]) -> int:
    """Runs `agentgym sft ...`; an interrupted run saves what was learned and has the exit code 130."""
    options = read_lesson(SftOptions, args, "sft")
    options.check()
    options.imitation(1 if options.steps is None else options.steps)  # refuses invalid settings before anything is read
    env = None if options.env is None else load_env(options.env, options.env_kwargs)
    if env is not None:
        policy_for(env, options.policy)
    return run_lesson(options, partial(_run, env))


def _run(env: TextEnv | None, options: SftOptions, ranks: Ranks | None, tracking: Tracking) -> int:
    pupil = open_pupil(options, ranks)
    options = replace(options, date=pupil.chat_format["date"])
    lesson = _of_rows(options, pupil) if env is None else _of_demonstrations(options, pupil.renderer, env)
    config = lesson.config.with_optimizer(pupil.model)
    given = asdict(replace(options, optimizer=config.optimizer)) | pupil.chat_format | {"steps": config.steps}
    folder = open_folder(
        options.output or _free_output(options), recorded_settings("sft", given), options, ranks, tracking
    )
    state = open_lesson(options, config, pupil, folder, ranks)
    display = _Display()
    for line in folder.recorded:
        display.note(ImitationStep(**line))

    def learn_lesson(on_step: Callable[[ImitationStep], None]) -> None:
        shown = lesson.shown_after(state.num_done * options.batch_size)
        learn(state, pupil.renderer, shown, config, validation=lesson.validation, on_step=on_step)

    try:
        interrupted = run_steps(pupil, state, folder, lesson.config.steps, learn_lesson, display.note)
    finally:
        if env is not None:
            env.close()
    _show(options, lesson, folder, display, interrupted=interrupted)
    return 130 if interrupted else 0


def _of_demonstrations(options: SftOptions, renderer: TemplateRenderer, env: TextEnv) -> _Lesson:
    config = options.imitation(ImitationConfig.steps if options.steps is None else options.steps)
    first = _first_seed(options.seed)
    return _Lesson(
        lambda done: stream([env], renderer, first + done, config.demonstrations),
        config,
        env,
        Task(options.env or "", 0, kwargs=options.env_kwargs),
    )


def _of_rows(options: SftOptions, pupil: Pupil) -> _Lesson:
    learned = _read(options, options.conversations or options.episodes, pupil)
    num_rows = len(learned.rows)
    steps = -(-options.epochs * num_rows // options.batch_size) if options.steps is None else options.steps
    validation = None
    if options.validation:
        rows = _read(options, options.validation, pupil).rows
        validation = Validation(rows, -(-num_rows // options.batch_size))

    def shown_after(done: int) -> Iterator[Demonstration]:
        return islice(passes(learned.rows, options.seed), done, None)

    return _Lesson(shown_after, options.imitation(steps), None, learned.task, num_rows, validation)


def _read(options: SftOptions, paths: Sequence[str], pupil: Pupil) -> SftRows:
    """Reads the rows of conversations or episodes; prints what was left out, and why."""
    renderer, window, vocab_size = pupil.renderer, pupil.model.context_window, pupil.model.vocab_size
    if options.conversations:
        files = ConversationSource(paths=tuple(paths), skip_malformed=options.skip_malformed)
        found = SftRows.of_conversations(files, renderer, window)
    else:
        runs = tuple(map(Path, paths))
        episodes = EpisodeSource(paths=runs, min_reward=options.min_reward, best_per_task=options.best_per_task)
        found = SftRows.of_episodes(episodes, renderer, vocab_size, window)
    for line in found.report:
        say(line)
    return found


def _free_output(options: SftOptions) -> Path:
    first = (options.env or "").rpartition(":")[2] or [*options.conversations, *options.episodes][0]
    return free_folder(Path("runs") / f"{Path(first).resolve().stem}-sft-seed{options.seed}")


def _first_seed(seed: int) -> int:
    """Returns the seed of a run's first task, far enough below the held-out ones."""
    return derive(seed, "sft") % (EVAL_SEED_START // 2)


def _show(options: SftOptions, lesson: _Lesson, folder: SftFolder, display: _Display, *, interrupted: bool) -> None:
    path, steps = folder.path, lesson.config.steps
    say(f"loss {display.first_loss:.4f} -> {display.loss:.4f} in {display.steps} steps, {display.elapsed_s:.0f} s")
    if display.validation_loss is not None:
        say(f"validation loss {display.validation_loss:.4f}")
    shown = f"{display.steps * options.batch_size} "
    if lesson.num_rows:
        num_passes = display.steps * options.batch_size / lesson.num_rows
        shown += f"rows, {num_passes:.1f} passes over {lesson.num_rows}"
    else:
        shown += f"demonstrations by {options.policy}, success {display.success or 0.0:.3f}"
    say(f"{shown}: {display.imitated_tokens:,} of {display.tokens:,} tokens imitated")
    say(f"model: {path}")
    play, own = play_options(lesson.task), own_code_options(options.family, options.model_backend)
    if interrupted:
        fail(f"interrupted after step {display.steps} of {steps}; {interrupted_hint('sft', folder)}")
    else:
        say(f"try next: agentgym eval {play} --policy {path}{own}")
        say(f"          agentgym train {play} --model {path}{own}")
    if options.json:
        found: dict[str, JSON] = {
            "output": str(path),
            "steps": display.steps,
            "rows": lesson.num_rows or None,
            "loss_first": display.first_loss if display.steps else None,
            "loss": display.loss if display.steps else None,
            "validation_loss": display.validation_loss,
            "tokens": display.tokens,
            "imitated_tokens": display.imitated_tokens,
            "demonstration_success": display.success,
            "elapsed_s": round(display.elapsed_s, 2),
            "interrupted": interrupted,
        }
        show_json(found)
