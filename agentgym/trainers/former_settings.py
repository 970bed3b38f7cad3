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

__all__ = [
    "FORMER_SETTINGS",
    "OF_BLOCK",
    "FormerSetting",
    "former_setting",
    "with_current_lesson_names",
    "with_current_names",
]

OF_BLOCK = {
    "learner": ("device", "dtype", "threads", "micro_batch_tokens", "activation_checkpointing", "lora"),
    "tracking": ("project",),
}
"""Settings of blocks that `sft` and `dpo` had without a block; their options still have these short names too."""


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


def _removals(block: str, why: str, **defaults: object) -> dict[str, FormerSetting]:
    return {f"{block}.{name}": FormerSetting(default, why=why) for name, default in defaults.items()}


def _renames(block: str, target: str, **defaults: object) -> dict[str, FormerSetting]:
    return {f"{block}.{name}": FormerSetting(default, f"{target}.{name}") for name, default in defaults.items()}


def _pair(block: str, name: str, **defaults: object) -> dict[str, FormerSetting]:
    """Returns the settings that became the numbers of `block.name`."""
    settings = enumerate(defaults.items())
    return {f"{block}.{part}": FormerSetting(default, f"{block}.{name}", index=n) for n, (part, default) in settings}


_TEST_NOTE = "it is for a model under test, which has it as eval --endpoint.*"
_REPLAY_NOTE = "learner.router.replay has the engine record them"

FORMER_SETTINGS: Mapping[str, FormerSetting] = {
    "eval_episodes": FormerSetting(200, "eval.episodes"),
    "over_dispatch": FormerSetting(0, why="max_staleness has later steps played while one is learned from"),
    "collapse.max_clip_fraction": FormerSetting(0.9, "collapse.thresholds.clipped"),
    "collapse.max_grad_growth": FormerSetting(10.0, "collapse.thresholds.gradient_exploded"),
    "collapse.max_kl": FormerSetting(2.0, "collapse.thresholds.kl_exploded"),
    "collapse.max_repetition_rise": FormerSetting(0.3, "collapse.thresholds.repetition"),
    "collapse.max_tool_faults": FormerSetting(0.1, "collapse.thresholds.tool_faults"),
    "learner.fsdp.param_dtype": FormerSetting(None, "learner.dtype"),
    **_removals("learner.fsdp", "gradients are always summed in float32", reduce_dtype="float32"),
    **_removals("learner.lora", "adapters have no dropout", dropout=0.0),
    "local.window": FormerSetting(None, "limits.context_window"),
    **_removals("local", "the engine compiles where it can", compile=False),
    **_removals("local", "it is always 0.5 s", keep_idle_s=0.5),
    **_removals("local", _REPLAY_NOTE, record_experts=False),
    **_pair("optimizer", "betas", beta1=0.9, beta2=0.98),
    **_removals("parity", "a probe has 4 episodes of at most 3 replies", episodes=4, turns=3),
    **_renames("practice.curriculum", "practice.curriculum.settings", raise_at=0.8, lower_at=0.2, window=16),
    **_renames("practice.curriculum", "practice.curriculum.settings", explore=0.1, keep=0.9),
    **_pair("practice.replay", "success", min_success=0.0, max_success=0.5),
    "ray.cpus_per_learner": FormerSetting(1.0, "ray.cpus.learner"),
    "ray.cpus_per_engine": FormerSetting(1.0, "ray.cpus.engine"),
    "ray.cpus_per_worker": FormerSetting(0.5, "ray.cpus.worker"),
    **_removals("ray", "engines read new weights from the object store", deltas=False, broadcast=False),
    **_removals("ray", "these ranks have the cores of the learner's", cpus_per_reference=1.0, cpus_per_critic=1.0),
    **_removals("ray", "these ranks have the GPUs of the learner's", gpus_per_reference=0.0, gpus_per_critic=0.0),
    **_removals("reward.judge.endpoint", _TEST_NOTE, price_prompt=None, price_cached=None, price_completion=None),
    **_removals("reward.judge.endpoint", _TEST_NOTE, stream=True, token_ids=True, text_marks=True, strict_tools=False),
    **_pair("reward.judge", "scale", lowest=0.0, highest=10.0),
    **_removals("sampler", "it is always 64", max_leaked_threads=64),
    **_removals("sampling", UNCUT, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0),
    **_removals("sampling", UNCUT, presence_penalty=0.0, frequency_penalty=0.0),
    **_removals("server", "a run keeps the logs of its servers in its folder", log_folder=""),
    **_removals("server.serving", "it is always 512", bucket_mb=512),
    **_removals("server.serving", "every update is verified", verify_sync=True),
    **_removals("server.serving", _REPLAY_NOTE, record_experts=False),
    **_removals("server.serving", "it is always 3", max_retries=3),
    **_removals("server.serving", f"it is always {COMMAND_S:g}", update_s=COMMAND_S),
    **_removals("server.serving", "it is always 2", affinity_margin=2.0),
    **_removals(
        "tracking", "256 entries may wait for a tracker, and the end of a run for 60 s", room=256, finish_s=60.0
    ),
}
"""The settings of `train` that earlier versions had, with their blocks; other commands have some of them too."""


def former_setting(name: str) -> FormerSetting | None:
    """Returns the former setting of that name; None for any other."""
    block, _, setting = name.partition(".")
    if block in FORMER_BLOCKS:
        name = f"server.{setting}"
        return FORMER_SETTINGS.get(name, FormerSetting(None, name))
    return FORMER_SETTINGS.get(name)


def with_current_names(settings: Mapping[str, Any], note: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Returns the settings of a run of an earlier version with today's names; `note` is called with lines on them.

    The `local` engine was called `hf`, and `server` was a block for each kind of server. All others are in
    `FORMER_SETTINGS`.
    """
    renamed = {"local" if name == "hf" else name: deepcopy(value) for name, value in settings.items()}
    if renamed.get("engine") == "hf":
        renamed["engine"] = "local"
    _choose_pass_type(renamed, note)
    for name, former in FORMER_SETTINGS.items():
        block, dot, setting = name.partition(".")
        for where in (*FORMER_BLOCKS, block) if block == "server" else (block,):
            _replace(renamed, f"{where}{dot}{setting}", former, note)
    return _with_server_block(renamed, note)


def _choose_pass_type(settings: dict[str, Any], note: Callable[[str], None]) -> None:
    """Leaves the one of two types that counted: on ranks `fsdp.param_dtype` if set, in one process `learner.dtype`."""
    learner = settings.get("learner")
    fsdp = learner.get("fsdp") if isinstance(learner, dict) else None
    if not isinstance(learner, dict) or not isinstance(fsdp, dict) or not fsdp.get("param_dtype"):
        return
    if settings.get("executor") == "local":
        del fsdp["param_dtype"]
        note("the setting learner.fsdp.param_dtype is left out: a run in one process has learner.dtype")
    else:
        learner.pop("dtype", None)


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
