"""A checkpoint of a run: the state after a step, in a folder that is refused unless it is complete."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from agentgym.chat_templates import Renderer
from agentgym.chat_templates.tokenizer import declared_ends, read_json_object
from agentgym.errors import AgentGymError, RunFolderError
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import write_model
from agentgym.rollout.record.manifest import replace_file, what_is_torn, write_manifest
from agentgym.trainers.checkpoints.state_copy import CopyMemory, contiguous_tree
from agentgym.trainers.parts.parts import SnapshotContent
from agentgym.types import JSON

__all__ = [
    "LEARNER",
    "Checkpoint",
    "LocalContent",
    "Snapshot",
    "checkpoint_folders",
    "copy_tokenizer",
    "guard_writes",
    "load_learner",
    "newest_whole",
    "step_of",
]

logger = logging.getLogger(__name__)

LEARNER, CRITIC, STATE = "learner", "critic", "state.json"
GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATES = ("*.jinja", "additional_chat_templates/*.jinja")
TOKENIZER_FILES = ("tokenizer*", SPECIAL_TOKENS, "chat_template*", GENERATION, *TEMPLATES)


class Checkpoint:
    """A checkpoint whose files match its manifest; raises RunFolderError naming the first file that does not.

    The folder is a model folder, which `transformers` and agentgym load, and also contains the trainer's state.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise RunFolderError(f"there is no checkpoint {str(path)!r}")
        if torn := what_is_torn(path):
            raise RunFolderError(f"{str(path)!r} is not a whole checkpoint: {torn}")
        try:
            state = json.loads((path / STATE).read_text(encoding="utf-8"))
            step, tasks, numbers = int(state["step"]), dict(state["tasks"]), dict(state["random"])
        except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise RunFolderError(f"{str(path / STATE)!r} holds no state of a checkpoint: {error!r:.200}") from error
        self.step = step
        self.tasks: Mapping[str, JSON] = tasks
        """The state of the run's task source."""
        self.random: Mapping[str, JSON] = numbers
        """The states of the process's own random number generators at the end of the step."""

    def learner_state(self) -> Mapping[str, Any]:
        """Loads the state that `Learner.load_state_dict` takes."""
        return load_learner(self.path)


@dataclass(frozen=True, eq=False)
class LocalContent:
    """The tensors of a model on the CPU, or the copy of one on a GPU."""

    config: Mapping[str, JSON]
    """The contents of `config.json`."""
    model: Mapping[str, Tensor]
    """The weights by published name."""
    learner: Mapping[str, Any]
    is_live: bool

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        weights: Iterable[tuple[str, Tensor]],
        learner: Mapping[str, Any],
        memory: CopyMemory,
    ) -> LocalContent:
        """Takes the weights of the model, by published name, and the learner's state; copies those of a GPU.

        Those on the CPU must not change until they are written: a copy would take three times the model's memory.
        """
        state, is_live = {"model": dict(weights), "learner": learner}, model.embed.device.type == "cpu"
        tensors = contiguous_tree(state) if is_live else memory.copy_tree(state)
        return cls(model.to_hf(), tensors["model"], tensors["learner"], is_live)

    def write(self, folder: Path) -> None:
        """Writes the model and the learner's state to a folder."""
        write_model(self.config, self.model, folder)
        from agentgym.trainers.checkpoints.sharded_state import save_state  # here: it takes a second

        save_state(self.learner, folder / LEARNER)


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """All that a checkpoint of a step contains; later changes affect it only where its content `is_live`."""

    step: int
    content: SnapshotContent
    tokenizer: Path
    """The folder whose tokenizer is copied into the checkpoint."""
    renderer: Renderer | None = None
    """The chat template of the run, at whose stop ids generation ends; None leaves those of the folder."""
    tasks: Mapping[str, JSON]
    random: Mapping[str, JSON]
    record: Mapping[str, JSON] = field(default_factory=dict)
    """The digests of the run's record up to the step, by file (`RunFolder.heads`)."""

    def write(self, folder: Path) -> None:
        """Writes the files, with the manifest last."""
        self.content.write(folder)
        copy_tokenizer(self.tokenizer, folder, self.renderer)
        state = {"step": self.step, "policy_version": self.step, "tasks": self.tasks, "random": self.random}
        (folder / STATE).write_text(json.dumps(state, default=dict) + "\n")
        write_manifest(folder, {"step": self.step, "record": self.record})


def load_learner(checkpoint: Path) -> dict[str, Any]:
    """Returns the state of the learner that a checkpoint contains, as `Learner.load_state_dict` takes it."""
    from agentgym.trainers.checkpoints.sharded_state import load_state  # here: it takes a second

    state: dict[str, Any] = {}
    for folder in learner_folders(checkpoint):
        state |= load_state(folder)
    return state


def learner_folders(checkpoint: Path) -> list[Path]:
    """Returns the folders of the parts of a learner's state; that of a critic's own ranks is a part of its own."""
    critic = checkpoint / CRITIC
    return [checkpoint / LEARNER, *([critic] if critic.is_dir() else [])]


def checkpoint_folders(run: Path) -> list[Path]:
    """Returns the folders of a run's checkpoints, the newest last, without checking that they are complete."""
    return sorted((path for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdigit()), key=step_of)


def step_of(folder: Path) -> int:
    """Returns the step of a checkpoint from its folder's name, such as `step-000020`."""
    return int(folder.name[5:])


def newest_whole(run: Path) -> Checkpoint | None:
    """Returns the newest complete checkpoint, or None if there is no checkpoint at all.

    Logs a warning that names the fault of each newer, torn one. Raises RunFolderError if there are checkpoints, but
    none of them is complete.
    """
    folders = checkpoint_folders(run)
    refused: list[str] = []
    for folder in reversed(folders):
        try:
            checkpoint = Checkpoint(folder)
        except RunFolderError as error:
            refused.append(str(error))
            continue
        if refused:
            logger.warning("%s. The one before is taken, step %d", ". ".join(refused), checkpoint.step)
        return checkpoint
    if refused:
        raise RunFolderError(
            f"{'. '.join(refused)}. No checkpoint of the run is whole: get one back from a copy, or delete"
            f" {str(run / 'checkpoints')!r}, and the run begins again"
        )
    return None


def copy_tokenizer(source: Path, folder: Path, renderer: Renderer | None = None) -> None:
    """Copies the files of a model folder's tokenizer, chat templates and generation settings into one with its model.

    If generation would go on after a stop id of the `renderer`, its stop ids become those of the folder, and the first
    one the tokenizer's end token, unless a template writes that token.
    """
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    if renderer is None or set(renderer.stop_ids) <= set(declared_ends(folder)):
        return
    # Without a file, transformers takes these from config.json.
    config = read_json_object(folder / "config.json")
    token_ids = {name: config[name] for name in ("bos_token_id", "pad_token_id") if name in config}
    generation = (read_json_object(folder / GENERATION) or token_ids) | {"eos_token_id": list(renderer.stop_ids)}
    replace_file(folder / GENERATION, json.dumps(generation, indent=2) + "\n")
    templates = [file.read_text(encoding="utf-8") for pattern in TEMPLATES for file in folder.glob(pattern)]
    files = {name: read_json_object(folder / name) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS)}
    if any("eos_token" in text for text in (*templates, str(files[TOKENIZER_CONFIG].get("chat_template")))):
        return
    for name, tokens in files.items():
        if tokens:
            tokens["eos_token"] = renderer.decode(renderer.stop_ids[:1])
            replace_file(folder / name, json.dumps(tokens, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def guard_writes(folder: Path) -> Iterator[None]:
    """Converts a failed write (a full disk, a missing permission) to a RunFolderError that names the folder."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a failed write as RuntimeError
        if isinstance(error, AgentGymError):
            raise
        reason = error if isinstance(error, OSError) else f"{_room(folder)}{error}"
        raise RunFolderError(
            f"cannot write to {str(folder)!r}: {reason}. What was written before is whole; make room and go on"
            " with --resume"
        ) from error


def _room(folder: Path) -> str:
    """Returns the free disk space as text, which torch's error of a failed write lacks; "" if it is unknown."""
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB are free there, and torch says: "
    except OSError:
        return ""
