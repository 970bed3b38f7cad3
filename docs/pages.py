"""Writes `algorithms`, `architectures`, `environments`, and tables in `verl` and `trl`: python docs/pages.py.

`python docs/pages.py --skill DIR` writes the documentation as a skill for coding agents: SKILL.md and `references/`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from agentgym.cli.foreign.keys import Key
from agentgym.cli.foreign.trl_keys import TRL_KEYS
from agentgym.cli.foreign.trl_lessons import DPO_OWN, SFT_OWN
from agentgym.cli.foreign.verl_keys import VERL_KEYS
from agentgym.envs.catalog.listing import Listed, describe_env
from agentgym.envs.catalog.plugin import BUNDLED
from agentgym.trainers.algorithms.catalog import TABLES, Algorithm, all_algorithms
from agentgym.trainers.model_check.known import KnownModel, known_models

NUMBERS = ("logprobs", "gradients", "samples", "same bits", "adapters", "ranks", "export", "replay", "sglang", "vllm")
"""The checks of architectures whose findings the page shows."""
BEGIN, END = "<!-- settings: python docs/pages.py -->", "<!-- end of settings -->"
FOREIGN = {"verl": [("verl", VERL_KEYS)], "trl": [("SFTConfig", SFT_OWN), ("DPOConfig", DPO_OWN), ("TRL", TRL_KEYS)]}
"""The tables of settings that `agentgym import` reads, by the page, in their order; each with the name of theirs."""
SKILL = (
    "How to use agentgym, a Gymnasium for language-model agents. Read it to write an environment or a reward, play or"
    " evaluate a model, train one by reinforcement learning or imitation, move a project from verl, TRL or verifiers"
    " here, or find out what a run recorded."
)
"""When a coding agent reads the skill."""
PAGE_HEAD = """# Environments

Written by `python docs/pages.py` from the environments' cards. `agentgym env check ID` holds each to its card:
the oracle scores 1, the cheat 0, players without sense stay below the floor, and the baseline is what it says.
"""


def algorithms_page() -> str:
    """Returns the page `docs/algorithms.md`."""
    lines = [
        "# Algorithms",
        "",
        "Pure functions by name, read off their signatures and docstrings by `python docs/pages.py`.",
        "`agentgym.trainers` has the tables; `ADVANTAGES.register(name)` and its like add a function of yours, and",
        "every option takes one by its place too, `path/to/file.py:name` ([how](write_your_own.md)).",
    ]
    algorithms = all_algorithms()
    lines += ["", "## Presets", "", "`train` takes them as `--algo NAME`; what is set beside it wins.", ""]
    for preset in (algorithm for algorithm in algorithms if algorithm.kind == "preset"):
        lines.append(f"- **{preset.name}**: {preset.summary} {_settings_text(preset)}")
    for table in TABLES:
        lines += ["", f"## `{table.variable}`", "", f"`train` takes it as `{table.option}`."]
        for entry in (algorithm for algorithm in algorithms if algorithm.kind == table.kind):
            lines += ["", f"### {entry.name}", "", entry.summary, ""]
            lines += [
                *([entry.details, ""] if entry.details else []),
                f"Takes: {', '.join(entry.inputs)}. {_settings_text(entry)}",
            ]
    return "\n".join(lines) + "\n"


def _settings_text(algorithm: Algorithm) -> str:
    settings = [f"`{name}={default!r}`" for name, default in algorithm.settings.items()]
    return f"Settings: {', '.join(settings)}." if settings else "No settings."


def environments_page() -> str:
    """Returns the page `docs/environments.md`: the bundled environments, by their cards."""
    entries = [describe_env(env_id) for env_id in BUNDLED]
    return "\n".join([PAGE_HEAD, *_table(entries), *(line for entry in entries for line in _section(entry))]) + "\n"


def _table(entries: Iterable[Listed]) -> list[str]:
    lines = ["| environment | difficulty | tools | random |", "|---|---|---|---|"]
    for entry in entries:
        if entry.card is not None:
            difficulty = f"`{entry.card.difficulty}`".replace("|", ", ") if entry.card.difficulty else ""
            random = entry.card.baseline.get("random")
            cells = (entry.identity.id, difficulty, ", ".join(entry.tools), "" if random is None else f"{random:g}")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _section(entry: Listed) -> list[str]:
    card = entry.card
    if card is None:
        return []
    low, high = card.reward_range
    lines = ["", f"## {entry.identity.id}", "", card.task, ""]
    if entry.keywords:
        lines.append(f"- *Keywords:* `{entry.keywords}`")
    if card.difficulty is not None:
        levels = "; ".join(f"{value}: {text}" for value, text in card.difficulty.values.items())
        lines.append(f"- *Difficulty* (`{card.difficulty.keyword}`): {levels}")
    lines.append(f"- *Reward* ({low:g} to {high:g}): {card.reward}")
    if card.oracle:
        lines.append(f"- *Oracle* (scores 1): {card.oracle}")
    if card.cheat:
        lines.append(f"- *Cheat* (scores 0): {card.cheat}")
    lines.append(f"- *Players without sense* score at most {card.canary_floor:g}")
    if card.baseline:
        scores = ", ".join(f"{policy} {score:g}" for policy, score in card.baseline.items())
        lines.append(f"- *Baseline:* {scores} (mean score, default keywords)")
    lines.append(f"- *Data:* {card.data}. *Licence:* {card.licence or 'not told'}")
    return lines


def architectures_page() -> str:
    """Returns the page `docs/architectures.md`."""
    version, models = known_models()
    lines = [
        "# Architectures",
        "",
        "What `agentgym models check NAME` finds of a small random model of each architecture, in float32 on a CPU,",
        f"with transformers {version}; `python benchmarks/architectures.py` and `python docs/pages.py` write it. Of",
        "your own model, `agentgym models check FOLDER` says the same. A number is the largest difference from",
        "transformers itself: of a logprob in nats, of a gradient relative to the largest of its tensor.",
        "",
        "- **computed by**: the fast decoder, or transformers.",
        "- **rows**: packed, with shared prefixes computed once, or rows of their own, for a model with a state.",
        "- **samples**: two turns of four requests in the in-process engine. **same bits**: whatever is in flight.",
        "- **adapters**: merged in transformers, against adapters on the base. **export**: saved, and loaded again.",
        "- **ranks**: the gradient of a step on two FSDP2 ranks, against that of the same step in one process.",
        "- **replay**: replies of a mixture of experts, against the learner with the experts that sampled them.",
        "- **sglang**, **vllm**: replies of these servers on a CPU, where they were tried.",
        "- **calls**: the usual format of tool calls, of those of `agentgym tools families`.",
        "",
        f"| architecture | computed by | rows | {' | '.join(NUMBERS)} | calls |",
        f"|---|---|---|{'---|' * len(NUMBERS)}---|",
    ]
    reasons = []
    for model in models:
        cells = [f"`{model.architecture}`", _cell(model, "loads"), _rows_cell(model)]
        cells += [_cell(model, name) for name in NUMBERS]
        lines.append(f"| {' | '.join([*cells, model.family])} |")
        reasons += [
            f"- `{model.architecture}`, {name}: {result}"
            for name, (passed, result) in model.results.items()
            if not passed
        ]
    return "\n".join([*lines, "", "## What does not work", "", *reasons]) + "\n"


def _cell(model: KnownModel, check: str) -> str:
    if check not in model.results:
        return ""
    passed, result = model.results[check]
    if check in ("same bits", "replay") and passed:
        return "yes"
    return result.removesuffix(" nats").removesuffix(" of the largest").partition(" nats")[0] if passed else "**no**"


def _rows_cell(model: KnownModel) -> str:
    if "prefix" not in model.results:
        return ""
    return "own" if model.results["prefix"][1].startswith("rows of their own") else "packed"


def keys_table(library: str, keys: Iterable[Key]) -> str:
    """Returns the table of another library's settings; those with one remark share a line."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for key in keys:
        ours = ", ".join(f"`{name.strip()}`" for name in key.ours.split(",") if name.strip())
        ours = ours or {"same": "nothing to set", "lost": "none", "translated": "none"}[key.kind]
        place = key.theirs if key.kind == "translated" else key.theirs.rpartition(".")[0]
        rows.setdefault((place, ours, key.remark), []).append(f"`{key.theirs}`")
    lines = [f"| {library} | ours | the difference, or what to do |", "|---|---|---|"]
    lines += [f"| {', '.join(names)} | {ours} | {remark} |" for (_, ours, remark), names in rows.items()]
    return "\n".join(lines)


def with_keys(page: str, tables: Iterable[tuple[str, Iterable[Key]]]) -> str:
    """Returns a page with the tables of settings between its marks."""
    before, *parts = page.split(BEGIN)
    for part, (name, keys) in zip(parts, tables, strict=True):
        before += f"{BEGIN}\n\n{keys_table(name, keys)}\n\n{END}{part.split(END)[1]}"
    return before


def write_skill(target: Path) -> None:
    """Writes the folder of a skill: what agentgym is, its commands, and a page for each task in `references/`."""
    folder = Path(__file__).parent
    references = target / "references"
    references.mkdir(parents=True, exist_ok=True)
    for page in (*folder.glob("*.md"), folder.parent / "ARCHITECTURE.md"):
        text = page.read_text(encoding="utf-8").replace("](../ARCHITECTURE.md", "](ARCHITECTURE.md")
        text = re.sub(r"\]\(docs/", "](", text)
        text = re.sub(
            r"!?\[([^\]]*)\]\((?:\.\./[^)]*|[^)]*\.(?:png|svg))\)", r"\1", text
        )  # to what is not in the folder
        (references / page.name).write_text(text, encoding="utf-8")
    readme = (folder.parent / "README.md").read_text(encoding="utf-8")
    what, begin = readme.split("\n## ", 1)[0].partition("\n\n")[2], "## Play, evaluate, train\n"
    commands = begin + readme.partition(begin)[2].partition("## Your own model")[0]
    tasks = (references / "README.md").read_text(encoding="utf-8").partition("\n\n")[2]
    tasks = re.sub(r"\]\((?!http)", "](references/", tasks)
    head = f"---\nname: agentgym\ndescription: {SKILL}\n---\n"
    local = re.sub(r"\]\(docs/", "](references/", commands)
    text = f"{head}\n# agentgym\n\n{what.strip()}\n\n{local.strip()}\n\n## A page for each task\n\n{tasks.strip()}\n"
    (target / "SKILL.md").write_text(text, encoding="utf-8")


def main() -> None:
    """Writes the pages, or the skill."""
    folder = Path(__file__).parent
    if sys.argv[1:2] == ["--skill"] and len(sys.argv) == 3:
        write_skill(Path(sys.argv[2]))
        return
    (folder / "algorithms.md").write_text(algorithms_page(), encoding="utf-8")
    (folder / "architectures.md").write_text(architectures_page(), encoding="utf-8")
    (folder / "environments.md").write_text(environments_page(), encoding="utf-8")
    for name, tables in FOREIGN.items():
        page = folder / f"{name}.md"
        page.write_text(with_keys(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
