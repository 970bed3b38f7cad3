"""The settings of each `--algo`: an advantage estimator, alone or with a paper's loss, aggregation and sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from agentgym.errors import UnknownName, nearest
from agentgym.loading import is_code_path
from agentgym.trainers.algorithms.advantages import ADVANTAGES

__all__ = ["PRESETS", "Preset", "preset_of"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The settings of an algo, used where a run sets none of its own."""

    summary: str
    """The algorithm and its source, in a sentence."""
    advantage: str
    advantage_settings: Mapping[str, object] = field(default_factory=dict)
    loss: str = "ppo_clip"
    loss_settings: Mapping[str, object] = field(default_factory=dict)
    aggregation: str = "token-mean"
    filter: Literal["off", "reward", "success"] = "off"
    """The groups that are replaced by further ones, see `PracticeConfig`."""

    def command_line_settings(self) -> dict[str, object]:
        """The settings that differ from the defaults, by their names on the command line."""
        settings: dict[str, object] = {"advantage.name": self.advantage}
        settings |= {f"advantage.settings {name}": value for name, value in self.advantage_settings.items()}
        if self.loss != "ppo_clip":
            settings["learner.loss"] = self.loss
        settings |= {f"learner.loss-settings {name}": value for name, value in self.loss_settings.items()}
        if self.aggregation != "token-mean":
            settings["aggregation"] = self.aggregation
        if self.filter != "off":
            settings["practice.filter"] = self.filter
        return settings


PRESETS: Mapping[str, Preset] = {
    "ppo": Preset(
        summary="PPO with a critic (Schulman et al. 2017): generalized advantage estimation and the clipped loss. With"
        " gamma 1 an episode that its limit ends costs nothing, for the critic says that it would still be won.",
        advantage="gae",
        advantage_settings={"gamma": 0.997},
    ),
    "turn_ppo": Preset(
        summary="PPO whose steps are turns (Li et al. 2025, Turn-PPO): the critic's values between the replies.",
        advantage="turn_gae",
    ),
    "reinforce++": Preset(
        summary="REINFORCE++ (Hu et al. 2025): rewards to go, whitened over the batch, with the clipped loss.",
        advantage="reinforce_plus_plus",
    ),
    "dapo": Preset(
        summary="DAPO (Yu et al. 2025): GRPO with a higher bound above, token by token, without dead groups.",
        advantage="grpo",
        loss_settings={"clip_high": 0.28},
        filter="reward",
    ),
    "dr_grpo": Preset(
        summary="Dr. GRPO (Liu et al. 2025): no division by the group's deviation and none by a reply's length; the"
        " losses of an episode are summed and divided by a constant, norm_tokens.",
        advantage="dr_grpo",
        aggregation="seq-mean-token-sum-norm",
    ),
    "gspo": Preset(
        summary="GSPO (Zheng et al. 2025): GRPO's advantages, ratios of whole trajectories, each counted once.",
        advantage="grpo",
        loss="gspo",
        aggregation="seq-mean-token-mean",
    ),
    "cispo": Preset(
        summary="CISPO (MiniMax 2025): GRPO's advantages; the importance weight is clipped, no gradient is cut off.",
        advantage="grpo",
        loss="cispo",
    ),
    "gmpo": Preset(
        summary="GMPO (Zhao et al. 2025): GRPO's advantages, the geometric mean of a trajectory's ratios.",
        advantage="grpo",
        loss="geo_mean",
        aggregation="seq-mean-token-mean",
    ),
    "sapo": Preset(
        summary="SAPO (Qwen Team 2025): GRPO's advantages, a soft gate in the place of the clip.",
        advantage="grpo",
        loss="sapo",
        aggregation="seq-mean-token-mean",
    ),
    "distill": Preset(
        summary="On-policy distillation (Agarwal et al. 2024; Lu et al. 2025): the policy plays, and its tokens learn"
        " from a teacher alone: --learner.kl.reference MODEL --learner.kl.coefficient 1 --learner.kl.penalty jsd.",
        advantage="none",
    ),
}
"""The presets by name. The name or location of any advantage estimator is an algo too, with defaults for the rest."""


def preset_of(algo: str) -> Preset:
    """Returns the settings of an algo; raises UnknownName for one that does not exist.

    A location (`path/to/file.py:name`) is looked up when it is used.
    """
    if algo in PRESETS:
        return PRESETS[algo]
    if algo in ADVANTAGES or is_code_path(algo):
        return Preset(summary=f"The advantage estimator {algo}, with the clipped loss.", advantage=algo)
    names = sorted({*PRESETS, *ADVANTAGES})
    raise UnknownName(f"unknown algo {algo!r}{nearest(algo, names) or '.'} `agentgym algorithms list` shows all")
