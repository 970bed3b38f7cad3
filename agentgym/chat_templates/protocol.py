"""The chat format as the rollout uses it: messages to ids, ids to a message, and the exact ids in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from agentgym.types import Message, ToolSpec

__all__ = ["GrammarRenderer", "Renderer"]


@runtime_checkable
class Renderer(Protocol):
    """Renders and parses one model family's chat format, exact to the token."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a reply when sampled."""

    @property
    def vocab_size(self) -> int:
        """One more than the greatest id that the tokenizer has."""

    @property
    def thinking(self) -> tuple[str, str]:
        """The texts that open and close the model's reasoning; empty if it has none."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Returns the ids of the whole conversation, ending with the generation prompt."""

    def rerender(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Returns the ids of a conversation, ending with the generation prompt, for replies that were sampled before.

        The replies are as the template writes them now. Raises RenderError if the template leaves out their calls."""

    def extend(self, ids: Sequence[int], new_messages: Sequence[Message]) -> list[int]:
        """Returns only the ids to append to `ids` (a prompt and the reply sampled on it).

        They are the end of a cut reply if it lacks one, the separator, `new_messages` (tool, user or system messages),
        and the next generation prompt."""

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSpec] = (), prompt: Sequence[int] = (), stop: str = ""
    ) -> Message:
        """Returns the reply as a message; calls that cannot be read are MalformedCall. Never raises on model output.

        `tools` are those that the model was shown: some families write arguments without types. `prompt` are the ids
        that it was sampled on: some templates open the reasoning there, after some messages and not after others.
        `stop` is the stop string that the last id completes, if one ended the reply; text after it is left out."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the ids' text, special tokens included."""


@runtime_checkable
class GrammarRenderer(Protocol):
    """A renderer with a grammar for its calls, for engines that constrain what they sample."""

    def call_grammar(self, tools: Sequence[ToolSpec]) -> str:
        """Returns `Sampling.grammar` for calls to these tools; raises RenderError if the family has no grammar."""
