"""The limits of an episode, and the settings for sampling its replies."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Sampling
from agentgym.engines.stop_strings import stop_strings
from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_above_zero

__all__ = ["STALL_S", "Limits", "SamplingConfig"]

STALL_S = 120.0
"""The default of `Limits.stall_s`."""

MAX_TURN_TOKENS = 8192
"""The largest default of `Limits.turn_tokens`: a reply that rambles in a window of 100,000 ids ends here."""
UNKNOWN_WINDOW = 16_384
"""The window that the default is derived from if an engine does not report its own."""


@config_class
class SamplingConfig:
    """The distribution that replies are drawn from."""

    temperature: float = 1.0
    """The temperature; 0 is greedy, and logprobs are then those of temperature 1."""
    top_p: float = 1.0
    """The nucleus mass in (0, 1]; 1 is off."""
    top_k: int = 0
    """The number of most probable ids to sample from; 0 is off."""
    min_p: float = 0.0
    """Leaves out ids that are less probable than this share of the most probable one; 0 is off."""
    repetition_penalty: float = 1.0
    """Makes ids that prompt or reply have already less probable: positive logits are divided by it, negative ones
    multiplied; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each id that the reply has already, as OpenAI does; 0 is off."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the reply has the id; 0 is off."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply, such as </answer>, wherever they occur in it; the reply ends with the text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", stop_strings(self.stop))
        self.for_reply(1, seed=0)  # checks the rest

    def for_reply(self, max_tokens: int, *, seed: int, renderer: Renderer | None = None, grammar: str = "") -> Sampling:
        """Returns the settings for sampling one reply; a renderer has the ids that end it."""
        return Sampling(
            max_tokens=max_tokens,
            stop_ids=() if renderer is None else renderer.stop_ids,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=seed,
            grammar=grammar,
            stop=self.stop,
            decode=None if renderer is None else renderer.decode,
        )


@config_class
class Limits:
    """The budgets of one episode; the first to run out truncates it and gives its name to the stop reason.

    A row is never shortened to fit: what does not fit is not sampled, or not appended.
    """

    max_turns: int = 200
    """Replies in an episode; the environment's own limit is usually lower."""
    turn_tokens: int | None = None
    """The most ids of one reply. None takes a quarter of the model's window (more if an episode has fewer than four
    turns: a half, or the whole window for a single one), and at most 8,192; config.yaml then has the number."""
    trajectory_tokens: int | None = None
    """The most ids of all rows together, prompts and answers included; None leaves it to the context window."""
    context_window: int | None = None
    """The most ids that a prompt and its reply have together; None takes the engine's, and the smaller one applies."""
    deadline_s: float = 600.0
    """Wall-clock seconds of a whole episode, from its reset; after that the episode has the status `timeout`."""
    env_step_s: float = 60.0
    """Wall-clock seconds of one environment call (make, reset or step), counted from when it begins to run."""
    close_s: float = 3.0
    """Wall-clock seconds that closing an environment may delay the rollout; then it closes by itself or never."""
    stall_s: float | None = STALL_S
    """Seconds that an environment may hold Python's interpreter, so that no other episode and no Ctrl-C can run; then
    the run is ended, with the environment's name and stack. None never ends it."""
    cut_reply: Literal["truncate", "answer"] = "truncate"
    """The effect of a reply that reaches `turn_tokens`: it ends the episode, or goes to the environment as it is."""

    def __post_init__(self) -> None:
        check_above_zero(self, *(field.name for field in fields(self) if field.name != "cut_reply"))
        if self.cut_reply not in ("truncate", "answer"):
            raise ConfigError(f'cut_reply is "truncate" or "answer", got {self.cut_reply!r}')

    def turn_tokens_in(self, window: int | None, num_turns: int | None = None) -> int:
        """Returns the most ids of one reply in a model with this window (None if the window is unknown).

        `num_turns` is the environment's own limit of turns, if it has one.

        >>> Limits().turn_tokens_in(1024), Limits().turn_tokens_in(40_960), Limits().turn_tokens_in(1024, num_turns=1)
        (256, 8192, 1024)
        """
        if self.turn_tokens is not None:
            return self.turn_tokens
        windows = [size for size in (window, self.context_window) if size is not None]
        turns = min(self.max_turns, 4 if num_turns is None else num_turns, 4)
        return max(1, min(MAX_TURN_TOKENS, min(windows, default=UNKNOWN_WINDOW) // turns))
