"""A learned reward model: a sequence classifier of `transformers` that scores a conversation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from agentgym.errors import ConfigError, EngineError, RunFolderError
from agentgym.model.model_class import FOLDER_ALONE
from agentgym.openai_wire import message_to_openai
from agentgym.types import MalformedCall, Message, ToolCall

__all__ = ["RewardModel"]


class RewardModel:
    """Scores conversations, one at a time, with the chat template of its own tokenizer.

    Raises RunFolderError for a folder without such a model, ConfigError for a model that cannot score (no chat
    template, several outputs and no `label`).
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        device: str = "cpu",
        dtype: str = "float32",
        max_tokens: int = 4096,
        label: int | None = None,
    ) -> None:
        path = Path(folder)
        if not (path / "config.json").is_file():
            raise RunFolderError(f"no reward model in {str(path)!r}: it needs config.json, weights and a tokenizer")
        self.max_tokens = max_tokens
        try:
            loaded, report = transformers.AutoModelForSequenceClassification.from_pretrained(
                path, dtype=getattr(torch, dtype), output_loading_info=True, **FOLDER_ALONE
            )
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, **FOLDER_ALONE)
        except (OSError, ValueError, KeyError) as error:
            raise RunFolderError(f"the reward model in {str(path)!r} cannot be loaded: {error}") from error
        if missing := sorted(report["missing_keys"]):
            raise RunFolderError(f"{str(path)!r} is not a trained classifier: it lacks {missing[0]!r}")
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"the tokenizer in {str(path)!r} has no chat template: put a chat_template.jinja next to it"
            )
        num_labels = int(loaded.config.num_labels)
        if (label is None and num_labels != 1) or (label is not None and label >= num_labels):
            raise ConfigError(f"the reward model has {num_labels} outputs, got label={label}: name one, from 0 on")
        self._label = label or 0
        self._device = torch.device(device)
        self._model: Any = loaded.to(self._device).eval()

    def score(self, messages: Sequence[Message]) -> float:
        """Returns the model's output for the conversation; raises EngineError for one that is too long."""
        model_messages = [_message(message) for message in messages]
        ids = self._tokenizer.apply_chat_template(model_messages, tokenize=True, return_dict=False)
        if len(ids) > self.max_tokens:
            raise EngineError(f"the conversation has {len(ids)} tokens, and the reward model takes {self.max_tokens}")
        with torch.inference_mode():
            tokens_BT = torch.tensor([ids], device=self._device)
            logits_BL = self._model(input_ids=tokens_BT, attention_mask=torch.ones_like(tokens_BT)).logits
        return float(logits_BL[0, self._label].float().item())


def _message(message: Message) -> dict[str, Any]:
    """Returns the message in the form of chat templates: arguments are an object, not text."""
    fields: dict[str, Any] = dict(message_to_openai(message))
    if message.tool_calls:
        fields["tool_calls"] = [_call(call) for call in message.tool_calls]
        fields["content"] = message.content
    return fields


def _call(call: ToolCall | MalformedCall) -> dict[str, Any]:
    name, arguments = (
        ("malformed_call", {"raw": call.raw}) if isinstance(call, MalformedCall) else (call.name, call.arguments)
    )
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
