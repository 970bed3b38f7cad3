"""The interface of an inference engine: token ids in, token ids with logprobs and versions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from agentgym.engines.stop_strings import Decode, find_stop, stop_strings
from agentgym.errors import ConfigError, EngineError
from agentgym.model.published_weights import Weights
from agentgym.routed_experts import RoutedExperts
from agentgym.settings.functions import check_at_least

__all__ = ["Completion", "Engine", "FinishReason", "Sampling", "WeightSync"]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The settings for sampling one reply.

    `seed` belongs to the request: equal prompt, sampling and weights give the same ids.
    """

    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    """The temperature; 0 is greedy, and logprobs are then those of temperature 1."""
    top_p: float = 1.0
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
    seed: int = 0
    grammar: str = ""
    """An XGrammar structural tag as JSON that constrains the reply; empty for none.

    The logprobs are then those of the distribution that was sampled from: the model's own without what the grammar
    forbids. A trainer that knows only the model computes others. It needs an engine whose attribute `takes_grammar` is
    true.
    """
    stop: tuple[str, ...] = ()
    """Texts that end a reply. An engine may go on after one: the caller cuts the reply after the id that completes it.
    """
    decode: Decode | None = field(default=None, compare=False, repr=False)
    """Returns the text of ids, for engines of this process that look for `stop` themselves."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", stop_strings(self.stop))
        check_at_least(1, self, "max_tokens")
        check_at_least(0, self, "temperature", "top_k")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}; 1 switches it off")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min_p must be in [0, 1], got {self.min_p}; 0 switches it off")
        if not 0.0 < self.repetition_penalty <= 2.0:  # these bounds are those of the servers
            raise ConfigError(
                f"repetition_penalty must be above 0 and at most 2 (1 is off), got {self.repetition_penalty}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ConfigError(f"{name} must be in [-2, 2] (0 is off), got {getattr(self, name)}")

    @property
    def penalizes(self) -> bool:
        """True if ids that occurred are made less probable, or more."""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)

    def find_stop(self, ids: Sequence[int]) -> tuple[int, str] | None:
        """Returns how many of a reply's ids complete its first stop string, and that string; None if there is none.

        A stop id at the end is not part of the text. Without `decode` there is no text to look at.
        """
        if not self.stop or self.decode is None:
            return None
        return find_stop(ids[:-1] if ids[-1:] and ids[-1] in self.stop_ids else ids, self.stop, self.decode)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled reply.

    `ids` include the one that ended it; `logprobs` (fp32, natural) and `policy_versions` have one entry per id.
    Example: `Completion((9, 2), (-0.2, -0.01), (0, 0), "stop")`.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: FinishReason
    experts: RoutedExperts | None = None
    """The experts of all tokens of prompt and reply but the last; None unless the engine records them."""
    stop: str = ""
    """The stop string that ended the reply, in a reply that was cut after it; empty if an id or a limit ended it."""

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.logprobs) == len(self.policy_versions):
            lengths = (len(self.ids), len(self.logprobs), len(self.policy_versions))
            raise EngineError(f"a completion's ids, logprobs and policy_versions have equal lengths, got {lengths}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSync:
    """The result of an `update_weights`, as far as the engine itself confirms it.

    Example: `WeightSync(version=3, checksum="9f2c...", num_tensors=46, num_bytes=4_160_000, transfer_s=0.05)`.
    """

    version: int
    """The policy version that the engine reports now."""
    checksum: str = ""
    """The checksum of the engine's own parameters; empty if the engine samples from the trained tensors themselves."""
    num_tensors: int = 0
    num_bytes: int = 0
    gather_s: float = 0.0
    """Seconds for collecting the tensors on the trainer's side."""
    transfer_s: float = 0.0
    """Seconds for sending them, including the engine's copying if it cannot be measured apart."""
    load_s: float = 0.0
    """Seconds for the rest: finishing the update, flushing the cache, checking."""


@runtime_checkable
class Engine(Protocol):
    """An inference engine.

    `session` names an episode: its turns share a prefix cache (and a replica).
    """

    @property
    def vocab_size(self) -> int:
        """The number of token ids: ids in `[0, vocab_size)` may be sent."""

    @property
    def context_window(self) -> int:
        """The most tokens that prompt and reply may have together."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Samples one reply; raises EngineError if it cannot (ids out of range, over the window, closed)."""

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Makes `weights` the policy from the next sampled token on, as version `version`.

        Raises EngineError if the engine does not confirm it.
        """

    async def pause(self) -> None:
        """Stops sampling at a token boundary; requests stay in flight."""

    async def resume(self) -> None:
        """Continues after `pause`."""

    async def abort(self, session: str) -> None:
        """Ends the session's request in flight with finish reason `abort`, and releases the session's resources.

        Called at the end of every episode; harmless if there is nothing to end.
        """

    async def close(self) -> None:
        """Releases everything; a second call does nothing."""
