"""A fast tokenizer with its chat template, from a model folder or from an object that holds both."""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from tokenizers import AddedToken, Tokenizer

from agentgym.chat_templates.named_templates import fitting_templates
from agentgym.errors import NOT_JSON, RenderError, RunFolderError

__all__ = ["LONG_TEXT", "ChatTokenizer", "HoldsTokenizer", "declared_ends", "read_json_object"]

LONG_TEXT = 4096
"""The characters (or ids) from which on the work on a text lets other threads go on meanwhile."""
MEMO_TEXT, MEMO_TEXTS = 1024, 2048
"""The characters of a text whose ids are remembered, and the number of such texts, at most: episodes of one task share
their prompts and many answers."""
ADDITIONAL_TEMPLATES = "additional_chat_templates"
"""The folder of templates for other purposes than a plain conversation, such as `tool_use.jinja`."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@runtime_checkable
class HoldsTokenizer(Protocol):
    """The part of a transformers fast tokenizer that is used here."""

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The tokenizer of the `tokenizers` library."""

    @property
    def special_tokens_map(self) -> Mapping[str, object]:
        """A mapping from the role of a special token (`eos_token`) to its text."""

    @property
    def chat_template(self) -> object:
        """The Jinja source, or sources by name."""


class _Memo(dict[str, tuple[int, ...]]):
    """The ids of texts that were encoded before, while `is_used`; empty after pickling or copying."""

    is_used = False

    def __reduce__(self) -> tuple[type[_Memo], tuple[()]]:
        return _Memo, ()


class _OneAtATime:
    """A lock that goes with the object it guards: after pickling or copying it is free."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[_OneAtATime], tuple[()]]:
        return _OneAtATime, ()


@dataclass(frozen=True)
class ChatTokenizer:
    """A `tokenizers.Tokenizer` with its Jinja template.

    `encode`, `encode_plain` and `decode` may be called from any thread. Nothing here changes the Rust object, which
    would raise "Already borrowed" in other threads. Calls for short texts take turns. A call for a long text is the
    batch of one, with the same result: batches release Python's lock.
    """

    backend: Tokenizer
    template: str
    """The Jinja source for conversations."""
    tool_template: str = ""
    """The Jinja source for conversations with tools, if the model has a separate one for them."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """A mapping from role (`bos_token`, `eos_token`, ...) to text; the template sees them as variables."""
    stop_tokens: tuple[str, ...] = ()
    """Texts that end a reply, besides the one that the template puts there."""
    name: str = "tokenizer"
    """The tokenizer's name in messages."""
    num_sampled: int = 0
    """The number of ids that the folder's model can sample, often more than have a text; 0 if that is not known."""
    _memo: _Memo = field(default_factory=_Memo, init=False, repr=False, compare=False)
    lock: _OneAtATime = field(default_factory=_OneAtATime, init=False, repr=False, compare=False)
    """The lock to hold while using `backend`."""

    def __post_init__(self) -> None:
        if self.backend.truncation is not None or self.backend.padding is not None:
            backend = Tokenizer.from_str(self.backend.to_str())  # a copy: the caller's keeps its settings
            backend.no_truncation()
            backend.no_padding()
            object.__setattr__(self, "backend", backend)
        # Without it the first batch starts a pool of threads, and every fork after that writes a warning.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the greatest id; computed once, because a large vocabulary takes a tenth of a second."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @property
    def writes_date(self) -> bool:
        """True if one of its templates writes the present date, so that a run has to record that date."""
        return "strftime_now" in self.template + self.tool_template

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`; a spelled added token becomes its id. Raises RenderError if that fails."""
        ids = self._memo.get(text)
        if ids is not None:  # never without `remember_texts`
            return list(ids)
        try:
            if len(text) > LONG_TEXT:
                return list(self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            with self.lock:
                token_ids = list(self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except Exception as error:
            raise self._encode_error(text, error) from error
        if self._memo.is_used and len(text) <= MEMO_TEXT:
            if len(self._memo) >= MEMO_TEXTS:
                self._memo.clear()
            self._memo[text] = tuple(token_ids)
        return token_ids

    @contextmanager
    def remember_texts(self) -> Iterator[None]:
        """Encodes equal short texts once inside the context, for work on the records of many equal tasks."""
        self._memo.is_used = True
        try:
            yield
        finally:
            self._memo.is_used = False
            self._memo.clear()

    def encode_plain(self, text: str) -> list[int]:
        """Returns the ids of `text` without added tokens, whatever it spells. Raises RenderError as `encode` does."""
        try:
            with self.lock:
                return self._encode_words(text)
        except Exception as error:
            raise self._encode_error(text, error) from error

    def _encode_words(self, text: str) -> list[int]:
        backend = self.backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        splitter = backend.pre_tokenizer
        words = [text] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]

    def _encode_error(self, text: str, error: Exception) -> RenderError:
        return RenderError(f"the tokenizer {self.name!r} cannot encode {text[:60]!r}: {error}")

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the ids' text, special tokens included; ids out of range give none."""
        size, valid_ids = self.vocab_size, ids
        if ids and not 0 <= min(ids) <= max(ids) < size:
            valid_ids = [index for index in ids if 0 <= index < size]
        if len(valid_ids) > LONG_TEXT:
            return str(self.backend.decode_batch([valid_ids], skip_special_tokens=False)[0])
        with self.lock:
            return str(self.backend.decode(valid_ids, skip_special_tokens=False))

    @staticmethod
    def load(folder: str | Path, template: str | None = None, *, needs_template: bool = True) -> ChatTokenizer:
        """Loads a model folder's tokenizer; raises RunFolderError or RenderError for what is missing or malformed.

        It reads `tokenizer.json`, `tokenizer_config.json`, and `chat_template.jinja` or a template in the config;
        `template` replaces these. Without `needs_template`, a folder that has none gives an empty one.
        """
        path = Path(folder)
        if not path.is_dir():
            raise RunFolderError(f"no model folder {str(path)!r}: give a folder that holds tokenizer.json")
        if not (path / "tokenizer.json").is_file():
            what = "tokenizer.json, the fast tokenizer"
            raise RunFolderError(f"{str(path)!r} has no {what}: save it there with AutoTokenizer...save_pretrained()")
        config = read_json_object(path / "tokenizer_config.json")
        try:
            backend = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:
            raise RunFolderError(f"{str(path / 'tokenizer.json')!r} is not a tokenizer: {error}") from error
        try:
            _add_missing_tokens(backend, config)
        except (TypeError, ValueError, AttributeError) as error:
            where = str(path / "tokenizer_config.json")
            raise RunFolderError(f"added_tokens_decoder of {where!r} is malformed: {error!r}") from error
        special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))}
        stops = [special["eos_token"]] if "eos_token" in special else []
        stops += [text for index in declared_ends(path) if (text := backend.id_to_token(index)) is not None]
        source, tool_source = _templates(path, config, backend, needs_template) if template is None else (template, "")
        num_sampled = next(_integers(_model_setting(path, "vocab_size")), 0)
        ends = tuple(dict.fromkeys(stops))
        return ChatTokenizer(backend, source, tool_source, special, ends, path.name, num_sampled)

    @staticmethod
    def of(holder: HoldsTokenizer) -> ChatTokenizer:
        """Copies the tokenizer of a transformers fast tokenizer object, whose calls change its truncation."""
        special = {name: str(text) for name, text in holder.special_tokens_map.items() if name in _SPECIAL_NAMES}
        stops = (special["eos_token"],) if "eos_token" in special else ()
        name = type(holder).__name__
        backend = Tokenizer.from_str(holder.backend_tokenizer.to_str())
        return ChatTokenizer(
            backend,
            *_choose(holder.chat_template, name, backend),
            special,
            stops,
            name,
        )


def declared_ends(path: Path) -> tuple[int, ...]:
    """Returns the ids at which transformers ends a reply: those of generation_config.json, else of config.json."""
    ends = read_json_object(path / "generation_config.json").get("eos_token_id")
    return tuple(_integers(_model_setting(path, "eos_token_id") if ends is None else ends))


def _integers(value: object) -> Iterator[int]:
    """Yields those of one number or several that may be a token's id."""
    items = value if isinstance(value, list) else [value]
    yield from (item for item in items if type(item) is int and 0 <= item < 1 << 32)


def _model_setting(path: Path, key: str) -> object:
    """Returns a setting of config.json, that of its language part if this has one."""
    config = read_json_object(path / "config.json")
    own = config.get("text_config")
    return {**config, **(own if isinstance(own, dict) else {})}.get(key)


def _add_missing_tokens(backend: Tokenizer, config: Mapping[str, object]) -> None:
    """Adds the tokens that only tokenizer_config.json names, as transformers does."""
    listed = config.get("added_tokens_decoder")
    tokens = backend.get_added_tokens_decoder()
    for index, entry in sorted(listed.items(), key=lambda item: int(item[0])) if isinstance(listed, dict) else ():
        if int(index) not in tokens:
            backend.add_tokens([AddedToken(**entry)])


def _templates(path: Path, config: Mapping[str, object], backend: Tokenizer, is_needed: bool) -> tuple[str, str]:
    files = [path / "chat_template.jinja", *sorted((path / ADDITIONAL_TEMPLATES).glob("*.jinja"))]
    texts: dict[str, str] = {}
    for file in filter(Path.is_file, files):
        try:
            texts[file.stem] = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise RenderError(f"the chat template {str(file)!r} is not UTF-8: {error}") from error
    template: object = texts.pop("chat_template", None) or config.get("chat_template")
    return _choose(template, str(path), backend, texts) if is_needed or template else ("", "")


def _choose(
    templates: object, name: str, backend: Tokenizer, files: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Returns the template and the one for tools, which is empty if there is none; those of `files` come first."""
    if isinstance(templates, list):
        templates = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, Mapping)}
    all_templates = {**(templates if isinstance(templates, Mapping) else {"default": templates}), **(files or {})}
    template, tool_template = all_templates.get("default"), all_templates.get("tool_use", "")
    if not isinstance(template, str) or not isinstance(tool_template, str) or not template:
        fitting = " or ".join(f"--chat-template {name}" for name in fitting_templates(backend))
        todo = f"its tokens fit {fitting}; or " if fitting else ""
        todo += "give one with --chat-template FILE, or put a chat_template.jinja next to its tokenizer.json"
        raise RenderError(f"the tokenizer {name!r} has no chat template, so it is not known how to talk to it: {todo}")
    return template, tool_template


def _token_text(entry: object) -> str | None:
    value = entry.get("content") if isinstance(entry, dict) else entry
    return value if isinstance(value, str) else None


def read_json_object(file: Path) -> dict[str, object]:
    """Returns the object of a JSON file, empty if there is no such file; raises RunFolderError for anything else."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFolderError(f"{str(file)!r} cannot be read: {error.strerror}") from error
    except NOT_JSON as error:
        raise RunFolderError(f"{str(file)!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RunFolderError(f"{str(file)!r} holds no JSON object")
    return value
