"""Settings of earlier versions, read under today's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

from agentgym.engines.server_kind import FORMER_BLOCKS, SERVERS
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.serving_settings import COMMAND_S
from agentgym.trainers.settings.sampling import UNCUT

__all__ = ["FORMER_SETTINGS", "FormerSetting", "with_current_names"]


@dataclass(frozen=True)
class FormerSetting:
    """A setting of earlier versions: its replacement, or the reason why there is none."""

    default: object
    """The value where it was not set; a file that has it is read without a word, as it changes nothing."""
    name: str = ""
    """Today's name; empty if the setting is gone."""
    why: str = ""
    """The reason why it is gone, in a sentence."""
    index: int | None = None
    """The index in the numbers of today's setting, if that has several."""


_AS_LEARNERS = "ranks of the reference and the critic have the resources of the learner's"
_RECORDED = "learner.router.replay has the engine record them"
_OF_EVAL = "it is for a model under test, which has it as eval --endpoint.*"

FORMER_SETTINGS: Mapping[str, FormerSetting] = {
    "collapse.max_tool_faults": FormerSetting(0.1, "collapse.thresholds.tool_faults"),
    "collapse.max_repetition_rise": FormerSetting(0.3, "collapse.thresholds.repetition"),
    "collapse.max_clip_fraction": FormerSetting(0.9, "collapse.thresholds.clipped"),
    "collapse.max_grad_growth": FormerSetting(10.0, "collapse.thresholds.gradient_exploded"),
    "collapse.max_kl": FormerSetting(2.0, "collapse.thresholds.kl_exploded"),
    "local.window": FormerSetting(None, "limits.context_window"),
    "local.keep_idle_s": FormerSetting(0.5, why="it is always 0.5 s"),
    "local.record_experts": FormerSetting(False, why=_RECORDED),
    "learner.fsdp.reduce_dtype": FormerSetting("float32", why="gradients are always summed in float32"),
    "optimizer.beta1": FormerSetting(0.9, "optimizer.betas", index=0),
    "optimizer.beta2": FormerSetting(0.98, "optimizer.betas", index=1),
    "parity.episodes": FormerSetting(4, why="a probe always has 4 episodes"),
    "parity.turns": FormerSetting(3, why="an episode of a probe always has 3 replies at most"),
    "practice.curriculum.raise_at": FormerSetting(0.8, "practice.curriculum.settings.raise_at"),
    "practice.curriculum.lower_at": FormerSetting(0.2, "practice.curriculum.settings.lower_at"),
    "practice.curriculum.window": FormerSetting(16, "practice.curriculum.settings.window"),
    "practice.curriculum.explore": FormerSetting(0.1, "practice.curriculum.settings.explore"),
    "practice.curriculum.keep": FormerSetting(0.9, "practice.curriculum.settings.keep"),
    "practice.replay.min_success": FormerSetting(0.0, "practice.replay.success", index=0),
    "practice.replay.max_success": FormerSetting(0.5, "practice.replay.success", index=1),
    "ray.cpus_per_learner": FormerSetting(1.0, "ray.cpus.learner"),
    "ray.cpus_per_engine": FormerSetting(1.0, "ray.cpus.engine"),
    "ray.cpus_per_worker": FormerSetting(0.5, "ray.cpus.worker"),
    "ray.cpus_per_reference": FormerSetting(1.0, why=_AS_LEARNERS),
    "ray.cpus_per_critic": FormerSetting(1.0, why=_AS_LEARNERS),
    "ray.gpus_per_reference": FormerSetting(0.0, why=_AS_LEARNERS),
    "ray.gpus_per_critic": FormerSetting(0.0, why=_AS_LEARNERS),
    "reward.judge.endpoint.price_prompt": FormerSetting(None, why=_OF_EVAL),
    "reward.judge.endpoint.price_cached": FormerSetting(None, why=_OF_EVAL),
    "reward.judge.endpoint.price_completion": FormerSetting(None, why=_OF_EVAL),
    "reward.judge.endpoint.stream": FormerSetting(True, why=_OF_EVAL),
    "reward.judge.endpoint.token_ids": FormerSetting(True, why=_OF_EVAL),
    "reward.judge.endpoint.text_marks": FormerSetting(True, why=_OF_EVAL),
    "reward.judge.endpoint.strict_tools": FormerSetting(False, why=_OF_EVAL),
    "reward.judge.lowest": FormerSetting(0.0, "reward.judge.scale", index=0),
    "reward.judge.highest": FormerSetting(10.0, "reward.judge.scale", index=1),
    "sampler.max_leaked_threads": FormerSetting(64, why="it is always 64"),
    "sampling.top_p": FormerSetting(1.0, why=UNCUT),
    "sampling.top_k": FormerSetting(0, why=UNCUT),
    "sampling.min_p": FormerSetting(0.0, why=UNCUT),
    "sampling.repetition_penalty": FormerSetting(1.0, why=UNCUT),
    "sampling.presence_penalty": FormerSetting(0.0, why=UNCUT),
    "sampling.frequency_penalty": FormerSetting(0.0, why=UNCUT),
    "server.log_folder": FormerSetting("", why="a run keeps the logs of its servers in its folder"),
    "server.serving.bucket_mb": FormerSetting(512, why="it is always 512"),
    "server.serving.verify_sync": FormerSetting(True, why="every update is verified"),
    "server.serving.record_experts": FormerSetting(False, why=_RECORDED),
    "server.serving.max_retries": FormerSetting(3, why="it is always 3"),
    "server.serving.update_s": FormerSetting(COMMAND_S, why=f"it is always {COMMAND_S:g}"),
    "tracking.room": FormerSetting(256, why="256 entries always may wait for a tracker"),
    "tracking.finish_s": FormerSetting(60.0, why="the end of a run always waits for 60 s"),
    "server.serving.affinity_margin": FormerSetting(2.0, why="it is always 2"),
}
"""The settings of `train` that earlier versions had, with their blocks; other commands have some of them too."""


def with_current_names(settings: Mapping[str, Any], note: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Returns the settings of a run of an earlier version with today's names; `note` is called with lines on them.

    The `local` engine was called `hf`, `eval.episodes` was `eval_episodes`, `learner.lora` had a `dropout` that was
    always 0, `local.compile` chose whether models of transformers were compiled, and `server` was a block for each kind
    of server. All others are in `FORMER_SETTINGS`.
    """
    renamed = {"local" if name == "hf" else name: deepcopy(value) for name, value in settings.items()}
    if renamed.get("engine") == "hf":
        renamed["engine"] = "local"
    if "eval_episodes" in renamed:
        renamed["eval"] = {"episodes": renamed.pop("eval_episodes")}
    if isinstance(local := renamed.get("local"), Mapping):
        renamed["local"] = {name: value for name, value in local.items() if name != "compile"}
    learner = renamed.get("learner")
    if isinstance(learner, Mapping) and isinstance(lora := learner.get("lora"), Mapping) and lora.get("dropout") == 0:
        renamed["learner"] = {**learner, "lora": {name: value for name, value in lora.items() if name != "dropout"}}
    for name, former in FORMER_SETTINGS.items():
        block, _, setting = name.partition(".")
        for where in (*FORMER_BLOCKS, block) if block == "server" else (block,):
            _replace(renamed, f"{where}.{setting}", former, note)
    return _with_server_block(renamed, note)


def _replace(settings: dict[str, Any], name: str, former: FormerSetting, note: Callable[[str], None]) -> None:
    """Gives a former setting its name of today, or takes it out."""
    *blocks, last = name.split(".")
    block: object = settings
    for part in blocks:
        block = block.get(part) if isinstance(block, dict) else None
    if not isinstance(block, dict) or last not in block:
        return
    value = block.pop(last)
    if value == former.default:
        return
    *blocks, last = former.name.split(".")
    target = settings
    for part in blocks:
        target[part] = target[part] if isinstance(target.get(part), dict) else {}
        target = target[part]
    if former.index is not None:
        defaults = [other.default for other in FORMER_SETTINGS.values() if other.name == former.name]
        numbers = enumerate(target.get(last) or defaults)
        value = [value if index == former.index else number for index, number in numbers]
    elif not former.name or target.get(last) is not None:
        note(f"the setting {name} is left out: {former.why or f'{former.name} is set too'}")
        return
    target[last] = value
    note(f"the setting {name} is called {former.name} now: rename it, as the next version will not read it")


def _with_server_block(settings: dict[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """Returns the settings with the block of the kind of server that samples as `server`.

    If no server samples, it is the first block that sets anything, for a command that names another engine.
    """
    blocks = {name: settings.pop(name) for name in FORMER_BLOCKS if isinstance(settings.get(name), Mapping)}
    changed = [name for name, block in blocks.items() if _differs(block, asdict(ServerConfig()))]
    engine = str(settings.get("engine", "local"))
    chosen = engine if engine in SERVERS else next(iter(changed), None)
    for name in changed:
        if name == chosen:
            settings.setdefault("server", blocks[name])
            note(f"the settings {name}.* are called server.* now: rename them, as the next version will not read them")
        else:
            note(f"the settings {name}.* are left out: server.* are those of one kind of server, here {chosen}")
    return settings


def _differs(block: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """True if a block of settings sets one to another value than its default."""
    return any(
        _differs(value, defaults.get(name, {}))
        if isinstance(value, Mapping)
        else (tuple(value) if isinstance(value, list) else value) != defaults.get(name)
        for name, value in block.items()
    )
