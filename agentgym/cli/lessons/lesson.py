"""The parts of every training on recorded text: its model, its steps with an interrupt, and its settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import tyro

import agentgym
from agentgym.chat_templates.families import format_to_record, renderer_for
from agentgym.chat_templates.recorded_format import recorded_format
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.chat_templates.template_date import check_date, present_date
from agentgym.cli.display.tables import progress
from agentgym.cli.options import parse_options, path_after, read_mapping
from agentgym.cli.run_folder import resumed_config
from agentgym.cli.signals import interrupted_between_steps
from agentgym.cli.terminal import say
from agentgym.errors import AgentGymError, TrainingHalted
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_name import EMBEDDED, model_folder
from agentgym.model.policy import backend_line, empty_policy, load_policy_on
from agentgym.trainers.checkpoints.checkpoint import learner_folders
from agentgym.trainers.config import config_from_mapping
from agentgym.trainers.learner.lora import adapt
from agentgym.trainers.learner.optimizer import check_optimizer
from agentgym.trainers.parallel.world import Sharded
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.settings.tracking import TrackingConfig
from agentgym.trainers.sft.lesson import LessonConfig
from agentgym.trainers.sft.lesson_batches import check_vocabulary
from agentgym.trainers.sft.lesson_ranks import join_ranks, of_rank_0
from agentgym.trainers.sft.lesson_state import LessonState
from agentgym.trainers.sft.sft_folder import SftFolder
from agentgym.trainers.trackers.tracking import Tracking
from agentgym.types import JSON, Task

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from agentgym.trainers.parallel.ranks import Ranks

__all__ = [
    "LessonOptions",
    "Pupil",
    "interrupted_hint",
    "open_folder",
    "open_lesson",
    "open_pupil",
    "play_options",
    "read_lesson",
    "recorded_settings",
    "run_lesson",
    "run_steps",
    "with_lora_seed",
]

S = TypeVar("S", bound="DataclassInstance")
ABOUT = ("kind", "agentgym")
"""The keys of a run's config.yaml that are no settings."""
OF_LEARNER = re.compile(r"--(no-)?(device|dtype|threads|micro.batch.tokens|activation.checkpointing|lora)([.=].*)?")
"""The options of the learner that may be named without `learner.`."""


@dataclass(frozen=True)
class Pupil:
    """A model that learns, with its chat format."""

    source: Path
    """The folder of its first weights, with the tokenizer."""
    renderer: TemplateRenderer
    model: LanguageModel
    """The model; without weights if ranks will have their shards of it."""
    chat_format: dict[str, Any]
    """The settings of the chat format to record: `family`, `chat_template_kwargs`, and `date`, which is that of the
    template if it writes one, else the one that was given."""


@dataclass(frozen=True, kw_only=True)
class LessonOptions:
    """The options that all commands have which train on recorded text."""

    model: str = EMBEDDED
    """The model to begin with, which is the reference of `dpo` too: `embedded`, a folder with a model and its
    tokenizer, or an id of the hub."""
    model_backend: str = "auto"
    """The code that computes the model: `auto`, `fast`, `transformers`, or a class of your own that derives from one of
    transformers', as `path/to/file.py:Class`."""
    family: str | None = None
    """The chat format of the model, by a name of `agentgym tools families`, or your own as `path/to/file.py:name`, a
    function `(tokenizer)` that returns a `TemplateRenderer`; None goes by its chat template."""
    chat_template: str = ""
    """A file with a chat template (Jinja) that replaces the model's, such as for a base model, which has none."""
    chat_template_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking=false for Qwen3."""
    date: str | None = None
    """The date that a chat template takes for today (`strftime_now`), such as 2026-03-01; None is the moment at which
    the run begins. If the template writes it, config.yaml then holds that moment."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A YAML file with these settings; options on the command line win."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """The folder for the model; by default a new one under runs/."""
    checkpoint_minutes: float | None = 10.0
    """Minutes between checkpoints, of which the newest is kept until the model is written; None writes none."""
    resume: bool = False
    """Go on in the folder of --output, with its settings, after its newest checkpoint."""
    trackers: tuple[str, ...] = ()
    """The trackers that receive the numbers of the steps besides the folder: any of tensorboard, wandb, mlflow and
    trackio, or your own as `path/to/file.py:name`."""
    project: str = TrackingConfig.project
    """The project or experiment of the trackers."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""

    def __post_init__(self) -> None:
        check_date(self.date)


Options = TypeVar("Options", bound=LessonOptions)


def run_lesson(options: Options, run: Callable[[Options, Ranks | None, Tracking], int]) -> int:
    """Calls `run` with the ranks of this process, and with the trackers, which are checked first; only rank 0 prints.

    Returns its exit code.
    """
    tracking = Tracking(options.trackers, TrackingConfig(project=options.project))
    with join_ranks(options.learner) as ranks:
        if ranks is not None and ranks.rank:
            options = replace(options, json=False)
        return run(options, ranks, tracking)


def open_pupil(options: LessonOptions, ranks: Ranks | None) -> Pupil:
    """Loads the model that the options name, or its sizes alone for `ranks`, and says which code computes it.

    Raises ConfigError for a tokenizer that is another model's.
    """
    check_optimizer(options.optimizer, is_resumed=options.resume)
    source = model_folder(options.model, options.chat_template)
    date = options.date or of_rank_0(ranks, present_date())
    variables = recorded_format(source).variables_with(options.chat_template_kwargs)
    renderer = renderer_for(source, options.family, date=date, variables=variables)
    model = _load(options, source) if ranks is None else empty_policy(source, backend=options.model_backend)
    check_vocabulary(renderer, model)
    if line := backend_line(model, source):
        say(line)
    family, written = format_to_record(renderer, options.family, date=date, given_date=options.date)
    return Pupil(source, renderer, model, {"family": family, "chat_template_kwargs": variables, "date": written})


def open_folder(
    path: Path, settings: Mapping[str, JSON], options: LessonOptions, ranks: Ranks | None, tracking: Tracking
) -> SftFolder:
    """Makes or opens the folder of the run; with several ranks, rank 0 does before the others read it."""
    resume, minutes = options.resume, options.checkpoint_minutes
    path, folder = of_rank_0(ranks, path), None
    if ranks is None or ranks.rank == 0:
        folder = SftFolder(path, settings, resume=resume, minutes=minutes, tracking=tracking)
    of_rank_0(ranks, None)  # the others wait for it
    return folder or SftFolder(path, settings, resume=resume, minutes=minutes, is_writer=False)


def open_lesson(
    options: LessonOptions, config: LessonConfig, pupil: Pupil, folder: SftFolder, ranks: Ranks | None
) -> LessonState:
    """Returns the state at the folder's checkpoint, or that of a model that has learned nothing yet."""
    checkpoint, lora = folder.checkpoint, config.learner.lora if config.learner.lora.rank else None

    def load(weights: Path) -> LanguageModel | Sharded:
        if ranks is None:
            return pupil.model if weights == pupil.source else _load(options, weights)
        prepare = None if lora is None else partial(adapt, config=lora)
        return ranks.load(weights, backend=options.model_backend, prepare=prepare)

    if checkpoint is None or lora is not None:
        state = config.begin(load(pupil.source))
    else:
        compares = config.loss_learner.needs_first_weights
        if not compares and ranks is None:
            pupil.model.to("cpu")  # a GPU needs its memory for the weights of the checkpoint
        state = config.begin(load(checkpoint.path), load(pupil.source) if compares else None)
    if checkpoint is not None:
        state.load(checkpoint.learner_state() if ranks is None else _open_learner(checkpoint.path))
        state.elapsed_s = float(folder.recorded[-1]["elapsed_s"])
        say(f"goes on after step {state.num_done}")
    return state


def _load(options: LessonOptions, weights: Path) -> LanguageModel:
    learner = options.learner
    return load_policy_on(learner.device, weights, dtype=learner.weights_dtype, backend=options.model_backend)


def with_lora_seed(learner: LearnerConfig, seed: int) -> LearnerConfig:
    """Returns the learner's settings with the seed of the run for its adapters, where none is given."""
    return replace(learner, lora=replace(learner.lora, seed=seed if learner.lora.seed is None else learner.lora.seed))


def _open_learner(checkpoint: Path) -> dict[str, Any]:
    """Returns the state of a checkpoint, of which each rank reads its shards."""
    from agentgym.trainers.checkpoints.sharded_state import open_state  # here: it takes a second

    (folder,) = learner_folders(checkpoint)
    return open_state(folder)


def run_steps(
    pupil: Pupil,
    state: LessonState,
    folder: SftFolder,
    num_steps: int,
    learn: Callable[[Callable[[S], None]], None],
    note: Callable[[S], str],
) -> bool:
    """Learns with a bar of so many steps, and saves the model however it ends; returns True if it was interrupted.

    `learn` takes the function that is called after each step, `note` gives the text next to the bar.
    """
    is_done, are_together = False, True
    try:
        with (
            folder.tracking_from(state.num_done),
            progress("steps", num_steps, state.num_done) as count,
            interrupted_between_steps() as check,
        ):

            def on_step(step: S) -> None:
                folder.write_metrics(step)
                count(note(step))
                if state.agree(_is_interrupted(check)):
                    folder.save_state(state, pupil.source, pupil.renderer, at_once=True)
                    raise KeyboardInterrupt
                folder.save_state(state, pupil.source, pupil.renderer)

            learn(on_step)
        is_done = True
    except KeyboardInterrupt:
        return True
    except AgentGymError as error:
        if state.ranks is not None and not isinstance(error, TrainingHalted):
            are_together = False  # the other ranks go on, until they miss this one
            raise
        folder.save_state(state, pupil.source, pupil.renderer, at_once=True)
        say(f"what was learned in {state.num_done} steps is in {folder.path}")
        raise
    finally:
        if are_together:
            state.close()
            folder.save_model(state, pupil.source, pupil.renderer, is_last=is_done)
        folder.close()
    return False


def _is_interrupted(check: Callable[[], None]) -> bool:
    """Returns True if an interrupt has arrived."""
    try:
        check()
    except KeyboardInterrupt:
        return True
    return False


def interrupted_hint(command: str, folder: SftFolder) -> str:
    """Returns what to do with the folder of an interrupted command."""
    again = f"; agentgym {command} --resume --output {folder.path} goes on" if folder.saves else ""
    return f"what was learned is in {folder.path}{again}"


def read_lesson(kind: type[Options], args: Sequence[str], command: str) -> Options:
    """Reads the options of a command, over the settings of the YAML file after `--config`.

    A run that is resumed has the file in its folder. The learner's settings may be named without `learner.`, as
    `--device` and `--lora.rank`. Raises ConfigError for a file that is none, and for settings that `kind` does not
    have; RunFolderError for a folder without a run.
    """
    args = [f"--learner.{arg[2:]}" if OF_LEARNER.fullmatch(arg) else arg for arg in args]
    path, default = path_after("--config", args) or resumed_config(args), None
    if path is not None:
        settings = {name: value for name, value in read_mapping(path).items() if name not in ABOUT}
        moved = {name: settings.pop(name) for name in list(settings) if OF_LEARNER.fullmatch(f"--{name}")}
        if moved:
            settings["learner"] = {**moved, **cast(Mapping[str, object], settings.get("learner", {}))}
        default = config_from_mapping(kind, settings)
    return parse_options(kind, args, prog=f"agentgym {command}", default=default)


def recorded_settings(kind: str, given: Mapping[str, object]) -> dict[str, JSON]:
    """Returns the settings of a command as config.yaml has them."""
    kept = {name: value for name, value in given.items() if name not in ("config", "output", "resume", "json")}
    plain: dict[str, JSON] = json.loads(
        json.dumps({"kind": kind, "agentgym": agentgym.__version__, **kept}, default=str)
    )
    return plain


def play_options(task: Task | None) -> str:
    """Returns the options that name a task's environment to another command."""
    if task is None:
        return "--env ID"
    keywords = "".join(f" {name}={json.dumps(value)}" for name, value in task.kwargs.items())
    return f"--env {task.env_id}" + (f" --env-kwargs{keywords}" if keywords else "")
