"""A small tokenizer trained on the spot, and the real ones of the shared test data where a checkout has them."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import agentgym.chat_templates
from agentgym.chat_templates import ChatMLRenderer, ChatTokenizer, TemplateRenderer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
EMBEDDED = (Path(agentgym.chat_templates.__file__).parent / "embedded.jinja").read_text(encoding="utf-8")
MARKS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
TRAINED_ON = ["You are in a small room. Exits: north, south.", '{"name": "go", "arguments": {"direction": "north"}}']


def tiny_backend(marks: tuple[str, ...] = MARKS) -> Tokenizer:
    """A byte-level BPE of the Qwen kind: NFC, merges across letters, marks as added tokens."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TRAINED_ON * 3, trainer)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in marks if "|" in text])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in marks if "|" not in text])
    return backend


@pytest.fixture(scope="session")
def bare_backend() -> Tokenizer:
    """The small tokenizer without any mark."""
    return tiny_backend(())


@pytest.fixture(scope="session")
def tiny() -> ChatTokenizer:
    """The embedded template over the small tokenizer."""
    special = {"eos_token": "<|im_end|>"}
    return ChatTokenizer(tiny_backend(), EMBEDDED, special_tokens=special, stop_tokens=("<|im_end|>", "<|endoftext|>"))


@pytest.fixture(scope="session")
def chatml(tiny: ChatTokenizer) -> ChatMLRenderer:
    return ChatMLRenderer(tiny)


@pytest.fixture(scope="session", params=[ChatMLRenderer, TemplateRenderer])
def renderer(request: pytest.FixtureRequest, tiny: ChatTokenizer) -> TemplateRenderer:
    """Both renderers of the small tokenizer, one after the other."""
    return request.param(tiny)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"the shared test data {SHARED} is not beside this checkout")
    return SHARED


class UnpackedFolders(Mapping[str, Path]):
    """The folders of archives by their names; each is unpacked when it is first asked for, in a quarter of a second."""

    def __init__(self, archives: Path, target: Path, gptoss_template: Path) -> None:
        self._archives = {path.name.removesuffix(".tar.xz"): path for path in sorted(archives.glob("*.tar.xz"))}
        self._target, self._gptoss_template = target, gptoss_template

    def __getitem__(self, name: str) -> Path:
        archive, folder = self._archives[name], self._target / name
        if not folder.exists():
            with tarfile.open(archive) as tar:
                tar.extractall(self._target, filter="data")
            if name == "gptoss":
                shutil.copyfile(self._gptoss_template, folder / "chat_template.jinja")
        return folder

    def __iter__(self) -> Iterator[str]:
        return iter(self._archives)

    def __len__(self) -> int:
        return len(self._archives)


@pytest.fixture(scope="session")
def real_folders(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Name to folder of the real tokenizers; gpt-oss gets its template from the file beside it."""
    template = shared / "chat_templates" / "openai-gpt-oss-120b.jinja"
    return UnpackedFolders(shared / "tokenizers", tmp_path_factory.mktemp("tokenizers"), template)
