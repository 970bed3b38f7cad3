"""The form of requests that an endpoint accepts, learned from its refusals."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentgym.engines.openai.config import ChatEndpointConfig
from agentgym.engines.openai.reply import ChatReply
from agentgym.engines.protocol import Sampling
from agentgym.engines.servers.http import HttpRefusal
from agentgym.openai_wire import message_to_openai
from agentgym.types import JSON, Message, ToolSpec

__all__ = ["Dialect", "to_wire"]

IDS = ("return_token_ids", "return_prompt_token_ids", "return_meta_info", "logprobs")
FURTHER = ("top_k", "min_p", "presence_penalty", "frequency_penalty")
NEUTRAL: Mapping[str, JSON] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""The sampling settings that SGLang and vLLM would take from the model's `generation_config.json` if they were
missing."""
STOP_SETTINGS: Mapping[str, JSON] = {"include_stop_str_in_output": True, "no_stop_trim": True}
"""vLLM's and SGLang's settings that keep a stop string in the text of a reply that it ends."""
SAMPLING: Mapping[str, str] = {"top_p": r"\btop[ _-]?p\b", "temperature": "temperature"}
"""The settings that some models refuse, each or both together. They are sent at 1 too: the default of many models is
another value (SGLang and vLLM read it from `generation_config.json`)."""
RANGE = re.compile(r"\b(between|(in|out of|valid) range|(less|greater) than|at (most|least)|strictly)\b", re.IGNORECASE)
"""The words about a value that the user has to change."""
SEED_BITS = 31

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Dialect:
    """The form of an endpoint's requests; `adapt` changes it after a refusal, until nothing is left to give up."""

    stream: bool
    token_ids: bool
    neutral: bool = True
    seed: bool = True
    stream_usage: bool = True
    limit_name: str = "max_tokens"
    calls_in_text: bool = False
    """True if the server cannot parse calls: it is asked not to, and leaves them in the text."""
    strict: bool = False
    """True if calls are constrained to their schemas."""
    left_out: tuple[str, ...] = ()
    """The sampling settings that the model refuses: it samples with its own defaults."""
    revision: int = 0
    """The number of changes; a request that was refused in an older form is sent again in the newer one."""
    _given_up: list[str] = field(default_factory=list)
    _wants_stream: bool = True

    @staticmethod
    def of(config: ChatEndpointConfig) -> Dialect:
        """Returns the form that asks for the most."""
        return Dialect(
            stream=config.stream,
            token_ids=config.token_ids,
            strict=config.strict_tools,
            _wants_stream=config.stream,
        )

    def body(
        self,
        model: str,
        messages: Sequence[Message | ChatReply],
        tools: Sequence[ToolSpec],
        sampling: Sampling,
        max_tokens: int | None,
    ) -> dict[str, JSON]:
        """Returns the JSON of a request; without `max_tokens`, only the context window ends the reply."""
        body: dict[str, JSON] = {
            "model": model,
            "messages": [to_wire(message) for message in messages],
            **{name: getattr(sampling, name) for name in SAMPLING if name not in self.left_out},
        }
        if max_tokens is not None:
            body[self.limit_name] = max_tokens
        if self.seed:
            body["seed"] = sampling.seed % (1 << SEED_BITS)
        if tools:
            body["tools"] = [self._tool(tool) for tool in tools]
            if self.calls_in_text:
                body["tool_choice"] = "none"
        if sampling.stop:
            body["stop"] = [*sampling.stop]
        if self.neutral:
            body.update({**NEUTRAL, **(STOP_SETTINGS if sampling.stop else {})})
        body |= {name: value for name in FURTHER if (value := getattr(sampling, name))}
        if sampling.repetition_penalty != 1.0:
            body["repetition_penalty"] = sampling.repetition_penalty
        if self.token_ids:
            body.update(dict.fromkeys(IDS, True))
        if self.stream:
            body["stream"] = True
            if self.stream_usage:
                body["stream_options"] = {"include_usage": True}
        return body

    def _tool(self, tool: ToolSpec) -> dict[str, JSON]:
        wire = tool.to_openai()
        if self.strict:
            assert isinstance(wire["function"], dict)
            wire["function"]["strict"] = True
        return wire

    def adapt(self, refusal: HttpRefusal, sampling: Sampling, *, revision: int, first: bool) -> bool:
        """Gives up what the refusal names; or, before the `first` answer, all non-standard fields.

        `revision` is that of the refused request. Returns False if the refusal is not about the request's form.
        """
        if refusal.status not in (400, 422):
            return False
        if revision != self.revision:
            return True
        part = self._refused_part(str(refusal), sampling)
        step = part or ("extras" if first and (self.neutral or self.token_ids) else "")
        if not step or step in self._given_up:
            return False
        self._given_up.append(step)
        self.revision += 1
        if step == "stream":
            self.stream = False
        elif step == "calls":
            self.calls_in_text = True
        elif step == "limit":
            self.limit_name = "max_completion_tokens"
        elif step in SAMPLING:
            self.left_out += (step,)
            value, effect = getattr(sampling, step), "which changes the results unless that is its default"
            logger.warning("the model refuses %s=%g: it is asked without, %s", step, value, effect)
        else:
            self.neutral = self.neutral and step not in ("neutral", "extras")
            self.seed = self.seed and step != "seed"
            self.stream_usage = self.stream_usage and step != "stream_usage"
            if step in ("token_ids", "extras"):
                self.without_ids()
        return True

    def without_ids(self) -> None:
        """Asks for no ids from now on, and streams if that is wanted."""
        self.token_ids, self.stream = False, self._wants_stream

    def without_stream(self) -> None:
        """Asks for whole answers from now on."""
        self.stream = self._wants_stream = False
        self.revision += 1

    def _refused_part(self, words: str, sampling: Sampling) -> str:
        """Returns the part of the request that the server's message is about, or an empty string."""
        if "max_completion_tokens" in words and self.limit_name != "max_completion_tokens":
            return "limit"
        if "tool-call-parser" in words and not self.calls_in_text:
            return "calls"
        if self.token_ids and any(name in words for name in IDS):
            return "stream" if self.stream and "stream" in words else "token_ids"
        if self.neutral and any(name in words for name in (*NEUTRAL, *STOP_SETTINGS)):
            return "neutral"
        if self.stream_usage and "stream_options" in words:
            return "stream_usage"
        if self.seed and "seed" in words:
            return "seed"
        if RANGE.search(words):
            return ""
        names = [name for name in SAMPLING if name not in self.left_out and re.search(SAMPLING[name], words, re.I)]
        return min(names, key=lambda name: getattr(sampling, name) != 1, default="")  # of both, what changes nothing


def to_wire(message: Message | ChatReply) -> Mapping[str, JSON]:
    """Returns a message of the history as JSON; a reply goes back word for word.

    Reasoning is not sent back: templates drop it.
    """
    if isinstance(message, ChatReply):
        return message.said
    wire = message_to_openai(message)
    wire.pop("reasoning_content", None)
    return wire
