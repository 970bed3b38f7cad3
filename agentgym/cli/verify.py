"""`agentgym verify RUN`: checks every file of a run, and exits with 1 where one does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from agentgym.chat_templates.protocol import Renderer
from agentgym.cli.options import parse_options, path_after
from agentgym.cli.run_folder import custom_renderer_of_run, open_here, renderer_of_run, settings_of_run
from agentgym.cli.terminal import say, show_json
from agentgym.errors import ConfigError
from agentgym.evaluation.run_check.verify import NO_TOKENIZER, Recomputation, verify_run

__all__ = ["main"]


FOREIGN_REWARDS = "the rewards are not the environment's own: only its answers were compared"


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Checks a run: recomputes tokens, masks, prompts, replies, sums and groups from episodes.jsonl, and finds by
    digests what was edited or lost. Exit code 1 if something is wrong; `agentgym docs verify` explains each property.

    `agentgym models check FOLDER` checks a model, before any training.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    tokenizer: str | None = None
    """The model folder whose chat format the run was made with; by default that of the run's config.yaml."""
    deep: bool = False
    """Compute the record again: advantages from the rewards, logprobs with the checkpoints that are there (a sample of
    episodes for each), and every episode in its environment, with the recorded actions."""
    share: float = 1.0
    """The share of the episodes that --deep plays again, in (0, 1], drawn at random: for large runs."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym verify ...`."""
    if path_after("--model", args) is not None:
        raise ConfigError("`agentgym models check FOLDER` checks a model; verify is for runs")
    options = parse_options(VerifyOptions, args, prog="agentgym verify")
    if not 0 < options.share <= 1:
        raise ConfigError(f"--share is the share of episodes that are played again, in (0, 1], got {options.share:g}")
    own = None if options.deep else custom_renderer_of_run(options.run)
    lacking = f"it needs the run's own renderer, {own}, which --deep runs" if own else ""
    if options.deep:
        renderer = renderer_of_run(options.run, options.tokenizer)
    elif own:
        renderer = None
    else:
        renderer, lacking = open_here(renderer_of_run, options.run, options.tokenizer)
    lacking = lacking or NO_TOKENIZER
    recomputations = _recomputations(options, renderer) if options.deep else ()
    report = verify_run(options.run, renderer, recomputations, lacking=lacking)
    for line in report.lines():
        say(line)
    if options.json:
        show_json(report.to_json())
    return 0 if report.ok else 1


def _recomputations(options: VerifyOptions, renderer: Renderer | None) -> list[Recomputation]:
    """Returns what `--deep` computes again: all of a training run, only the episodes of another run."""
    run, share = options.run, options.share
    end_thinking = renderer.thinking[1] if renderer else "</think>"
    settings = settings_of_run(run)
    replay = import_module("agentgym.evaluation.run_check.replay").Replay  # the environments' libraries
    if "algo" not in settings:
        foreign = FOREIGN_REWARDS if "reward" in settings else ""  # an evaluation has it only where one is given
        return [
            replay(
                foreign_rewards=foreign,
                end_thinking=end_thinking,
                served=["eval"] if "agent" in settings else (),
                share=share,
            )
        ]
    recompute = import_module("agentgym.trainers.checkpoints.recompute")  # torch, which the other checks do not need
    config = recompute.config_of(run)
    foreign = FOREIGN_REWARDS if config.reward.source_names or config.reward.overlong.buffer_tokens else ""
    served = [
        name for name, is_served in (("train", config.is_played_outside), ("eval", config.agent.name)) if is_served
    ]
    return [
        recompute.RecomputedAdvantages(config),
        recompute.RecomputedLogprobs(run, config),
        replay(foreign_rewards=foreign, end_thinking=end_thinking, served=served, share=share),
    ]
