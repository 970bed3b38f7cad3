"""Settings of earlier versions, read under today's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentgym.engines.server_kind import FORMER_BLOCKS, SERVERS
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.serving_settings import COMMAND_S
from agentgym.trainers.config import config_from_mapping

__all__ = ["OF_BLOCK", "with_current_lesson_names", "with_current_names"]

OF_BLOCK = {
    "learner": ("device", "dtype", "threads", "micro_batch_tokens", "activation_checkpointing", "lora"),
    "tracking": ("project",),
}
"""Settings of blocks that `sft` and `dpo` had without a block; their options still have these short names too."""

GONE = {"update_s": COMMAND_S, "affinity_margin": 2.0}
"""Settings of `serving` that earlier versions had, and their values now."""


def with_current_names(settings: Mapping[str, Any], note: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Returns the settings of a run of an earlier version with today's names; `note` is called with lines on them.

    The `local` engine was called `hf`, `eval.episodes` was `eval_episodes`, `learner.lora` had a `dropout` that was
    always 0, `local.compile` chose whether models of transformers were compiled, and `server` was a block for each kind
    of server.
    """
    renamed = {"local" if name == "hf" else name: value for name, value in settings.items()}
    if renamed.get("engine") == "hf":
        renamed["engine"] = "local"
    if "eval_episodes" in renamed:
        renamed["eval"] = {"episodes": renamed.pop("eval_episodes")}
    if isinstance(local := renamed.get("local"), Mapping):
        renamed["local"] = {name: value for name, value in local.items() if name != "compile"}
    learner = renamed.get("learner")
    if isinstance(learner, Mapping) and isinstance(lora := learner.get("lora"), Mapping) and lora.get("dropout") == 0:
        renamed["learner"] = {**learner, "lora": {name: value for name, value in lora.items() if name != "dropout"}}
    return _with_server_block(renamed, note)


def _with_server_block(settings: dict[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """Returns the settings with the block of the kind of server that samples as `server`.

    If no server samples, it is the first block that sets anything, for a command that names another engine.
    """
    blocks = {
        name: _without_gone(settings.pop(name), name, note)
        for name in FORMER_BLOCKS
        if isinstance(settings.get(name), Mapping)
    }
    changed = [
        name for name, block in blocks.items() if config_from_mapping(ServerConfig, block, f"{name}.") != ServerConfig()
    ]
    engine = str(settings.get("engine", "local"))
    chosen = engine if engine in SERVERS else next(iter(changed), None)
    for name in changed:
        if name == chosen:
            settings.setdefault("server", blocks[name])
            note(f"the settings {name}.* are called server.* now: rename them, as the next version will not read them")
        else:
            note(f"the settings {name}.* are left out: server.* are those of one kind of server, here {chosen}")
    return settings


def _without_gone(block: Mapping[str, Any], where: str, note: Callable[[str], None]) -> dict[str, Any]:
    """Returns a kind's block without the settings that have a fixed value now."""
    serving = block.get("serving")
    if not isinstance(serving, Mapping):
        return dict(block)
    for name, value in GONE.items():
        if serving.get(name, value) != value:
            note(f"the setting {where}.serving.{name} is left out: it is always {value:g}")
    return {**block, "serving": {name: value for name, value in serving.items() if name not in GONE}}


def with_current_lesson_names(
    settings: Mapping[str, Any], note: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Returns the settings of `sft` or `dpo` of an earlier version with today's names; see `with_current_names`."""
    gone = ("kind", "agentgym", "checkpoint_minutes")
    renamed = {name: value for name, value in settings.items() if name not in gone}
    if "checkpoint_minutes" in settings:
        note("the setting checkpoint_minutes is left out: checkpoint.every counts steps")
    for block, names in OF_BLOCK.items():
        if moved := {name: renamed.pop(name) for name in names if name in renamed}:
            renamed[block] = {**moved, **renamed.get(block, {})}
    return renamed
