"""Commands on the scores of recorded episodes."""

__all__ = ["REWARD_SETTINGS"]

REWARD_SETTINGS = (
    *("reward.function", "reward.settings", "reward.remote.url", "reward.judge.url", "reward.judge.endpoint.model"),
    *("reward.judge.rubric", "reward.model.folder", "reward.model.device"),
)
"""The settings of a reward that `--help` shows."""
