"""The model that a fake server pretends to serve: vocabulary, window, end tokens, text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.tokenizer import ChatTokenizer, read_json_object
from agentgym.embedded import embedded_folder

__all__ = ["FakeModel"]

DEFAULT_WINDOW = 4096


class FakeModel:
    """A model folder's config and tokenizer; its weights are `FakeWeights`."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder) if folder is not None else embedded_folder()
        self.tokenizer = ChatTokenizer.load(self.folder)
        config = read_json_object(self.folder / "config.json")
        generation = read_json_object(self.folder / "generation_config.json")
        size = config.get("vocab_size")
        self.vocab_size = size if isinstance(size, int) else self.tokenizer.backend.get_vocab_size()
        window = config.get("max_position_embeddings")
        self.context_window = window if isinstance(window, int) else DEFAULT_WINDOW
        """The number of tokens of prompt and reply together; 4096 for a folder without a config."""
        self.type = str(config.get("model_type", "unknown"))
        self.architectures = config.get("architectures", [])
        self.dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        self.tied = bool(config.get("tie_word_embeddings", False))
        self.eos_ids = self._eos(generation.get("eos_token_id", config.get("eos_token_id")))

    @cached_property
    def renderer(self) -> Renderer:
        """The chat format, for chat completions and scripts."""
        return renderer_for(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Returns the text's ids; marks such as `<tool_call>` are single ids."""
        ids: list[int] = self.tokenizer.backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Returns the ids' text; ids outside of the tokenizer have none."""
        text: str = self.tokenizer.backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def _eos(self, value: object) -> tuple[int, ...]:
        listed = value if isinstance(value, list) else [value]
        ids = [index for index in listed if isinstance(index, int)]
        texts = self.tokenizer.stop_tokens
        ids += [index for text in texts if (index := self.tokenizer.backend.token_to_id(text)) is not None]
        return tuple(dict.fromkeys(ids))
