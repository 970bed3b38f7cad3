"""Replies to texts and conversations without an environment: order, seeds, errors, tools, and the file of replies."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentgym
from agentgym.cli.main import main
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.evaluation import Chat, ModelEngine, Reply
from agentgym.testing.fake_server.server import FakeSglang
from agentgym.tools import tool
from agentgym.types import Message, ToolCall


@pytest.fixture(scope="module")
def engine() -> Iterator[ModelEngine]:
    with agentgym.create_engine(num_slots=8) as opened:
        yield opened


PROMPTS = [f"Say the number {number}, please." for number in range(20)]


def ids(replies: list[Reply]) -> list[tuple[int, ...]]:
    return [reply.ids for reply in replies]


@pytest.mark.long
def test_replies_come_in_the_order_of_the_prompts_whatever_runs_beside_them(engine: ModelEngine) -> None:
    seen: list[Reply] = []
    together = engine.generate(PROMPTS, max_tokens=12, on_reply=seen.append)
    assert seen == together and len(together) == 20
    assert ids(engine.generate(PROMPTS, max_tokens=12, concurrency=1)) == ids(together)
    assert ids(engine.generate(iter(PROMPTS), max_tokens=12)) == ids(together)
    assert ids(engine.generate(PROMPTS, max_tokens=12, seed=1)) != ids(together)
    assert ids(engine.generate(PROMPTS[0], max_tokens=12)) == ids(together)[:1]
    assert [engine.renderer.render([Message("user", text)]) for text in PROMPTS] == [
        list(reply.prompt_ids) for reply in together
    ]


def test_a_prompt_is_a_text_a_message_or_messages(engine: ModelEngine) -> None:
    conversation = [Message("system", "Be brief."), {"role": "user", "content": "Hello"}]
    spoken = engine.generate(
        [conversation, Message("user", "Hello"), {"role": "user", "content": "Hello"}], max_tokens=4
    )
    assert spoken[0].prompt_ids != spoken[1].prompt_ids == spoken[2].prompt_ids
    assert all(reply.finish_reason in ("stop", "length") and not reply.error for reply in spoken)
    assert all(len(reply.logprobs) == len(reply.ids) <= 4 for reply in spoken)


def test_greedy_replies_are_equal_and_several_replies_are_not(engine: ModelEngine) -> None:
    first, second = engine.generate("Hello", num_replies=2, temperature=0.0, max_tokens=8)
    assert first.ids == second.ids
    drawn = engine.generate("Hello", num_replies=6, max_tokens=8)
    assert len(set(ids(drawn))) > 1
    assert set(ids(engine.generate("Hello", num_replies=6, max_tokens=8, min_p=1.0))) == {first.ids}


def test_a_stop_string_ends_a_reply_early_and_changes_no_id_before_it(engine: ModelEngine) -> None:
    counts = [engine.engine.num_steps]  # type: ignore[attr-defined]
    free = engine.generate(PROMPTS, max_tokens=40)
    counts.append(engine.engine.num_steps)  # type: ignore[attr-defined]
    ended = engine.generate(PROMPTS, max_tokens=40, stop='"dir')
    counts.append(engine.engine.num_steps)  # type: ignore[attr-defined]
    for whole, reply in zip(free, ended, strict=True):
        text = engine.renderer.decode(reply.ids)
        assert whole.ids[: len(reply.ids)] == reply.ids and whole.logprobs[: len(reply.ids)] == reply.logprobs
        if reply.stop:
            assert '"dir' in text and '"dir' not in engine.renderer.decode(reply.ids[:-1])
            assert reply.finish_reason == "stop" and len(reply.ids) < len(whole.ids)
        else:
            assert reply == whole and '"dir' not in text
    assert sum(bool(reply.stop) for reply in ended) > 10
    assert counts[2] - counts[1] < counts[1] - counts[0], "the engine itself stops there"
    chat = engine.chat(stop=["call"], max_tokens=40, temperature=0.0)
    assert [chat.send(text).stop for text in ("Hello", "And again")] == ["call"] * 2
    with pytest.raises(ConfigError, match="stop is a list of texts that are not empty"):
        engine.generate("Hello", stop=[""])


def test_what_cannot_be_answered_is_an_error_of_its_own_and_the_others_go_on(engine: ModelEngine) -> None:
    replies = engine.generate(
        [*PROMPTS[:1], [], "x" * 5000, {"role": "robot", "content": ""}, PROMPTS[1]], max_tokens=8
    )
    assert [bool(reply.error) for reply in replies] == [False, True, True, True, False]
    assert "a prompt is a text or a list of messages" in replies[1].error
    assert "tokens, and the window 1024" in replies[2].error
    assert "role is one of" in replies[3].error
    assert replies[2].text == "" and replies[2].finish_reason is None
    assert replies[4].ids == engine.generate(["", "", "", "", PROMPTS[1]], max_tokens=8)[4].ids


def test_settings_that_do_not_exist_are_named(engine: ModelEngine) -> None:
    with pytest.raises(ConfigError, match="no setting 'max_token': did you mean 'max_tokens'"):
        engine.generate("Hello", max_token=3)
    with pytest.raises(ConfigError, match="num_replies must be at least 1"):
        engine.generate("Hello", num_replies=0)
    with pytest.raises(ConfigError, match=r"min_p must be in \[0, 1\]"):
        engine.generate("Hello", min_p=2.0)
    with pytest.raises(ConfigError, match="no setting 'divice': did you mean 'device'"):
        agentgym.create_engine(divice="cpu")
    with pytest.raises(ConfigError, match="window is a setting of the local engine"):
        agentgym.create_engine(kind="sglang", window=512)


def test_a_program_with_an_event_loop_awaits_the_replies(engine: ModelEngine) -> None:
    async def program() -> list[list[Reply]]:
        return await asyncio.gather(*(engine.generate_async(PROMPTS[:3], max_tokens=8) for _ in range(2)))

    first, second = asyncio.run(program())
    assert ids(first) == ids(second) == ids(engine.generate(PROMPTS[:3], max_tokens=8))


def test_a_conversation_keeps_its_sampled_ids(engine: ModelEngine) -> None:
    chat = engine.chat("Be brief.", max_tokens=8)
    first = chat.send("Hello")
    second = chat.send("And again")
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.ids)] == (*first.prompt_ids, *first.ids)
    assert chat.ids == [*second.prompt_ids, *second.ids]
    again = engine.chat("Be brief.", max_tokens=8)
    assert again.send("Hello").ids == first.ids
    length = len(chat.messages)
    refused = chat.send("x" * 5000)
    assert "tokens, and the window" in refused.error
    assert len(chat.messages) == length and chat.send("Go on").ids
    assert chat.start().messages == []


class Calling(Chat):
    """A conversation whose model calls `add` until it is told 5."""

    async def _answer(self, new: Any) -> Reply:
        self.messages += new
        last = self.messages[-1].content
        call = ToolCall("call_0", "add", {"first": 2, "second": 3})
        message = Message("assistant", f"It is {last}") if last == "5" else Message("assistant", "", tool_calls=(call,))
        self.messages.append(message)
        return Reply(message=message, prompt_ids=(), ids=(1,), logprobs=(0.0,), finish_reason="stop")


@tool
def add(first: int, second: int) -> int:
    """Adds two numbers."""
    return first + second


def test_tools_are_run_until_a_reply_calls_none(engine: ModelEngine) -> None:
    model = engine.chat(tools=[add])._model
    assert [spec.name for spec in model.tools] == ["add"]
    chat = Calling(model, engine.run, max_calls=3).start("", [add])
    assert chat.send("2 + 3?").text == "It is 5"
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "assistant"]

    @tool(name="add")
    def subtract(first: int, second: int) -> int:
        """Never gives what the model waits for."""
        return first - second

    endless = Calling(model, engine.run, max_calls=3).start("", [subtract])
    assert endless.send("2 + 3?").message.tool_calls
    assert [message.role for message in endless.messages].count("tool") == 3

    @tool(name="add")
    def broken(first: int, second: int) -> int:
        """Fails by no mistake of the model."""
        raise OSError("the disk is gone")

    with pytest.raises(EnvironmentFault, match="the disk is gone"):
        Calling(model, engine.run).start("", [broken]).send("2 + 3?")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": text, "answer": str(number), "extra_info": {"n": number}, "id": f"row-{number}"}
        for number, text in enumerate(PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_command_writes_the_replies_that_python_returns(
    prompts: Path, tmp_path: Path, engine: ModelEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "replies.jsonl"
    words = ["generate", "--input", str(prompts), "--output", str(output), "--max-tokens", "12"]
    words += ["--keep", "id", "--ids", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == {"replies": 20, "kept": 0, "failed": 0, "output": str(output)}
    lines, replies = read(output), engine.generate(PROMPTS, max_tokens=12)
    assert [tuple(line["ids"]) for line in lines] == ids(replies)
    assert [line["messages"][0]["content"] for line in lines] == PROMPTS
    assert [line["ground_truth"] for line in lines] == [str(number) for number in range(20)]
    assert lines[3]["extra_info"] == {"n": 3, "id": "row-3"} and lines[3]["tokens"] == len(replies[3].ids)
    assert main(words) == 2
    assert "exists: go on with it by --resume" in capsys.readouterr().err


@pytest.mark.long
def test_a_cut_file_is_resumed_to_the_same_bytes_and_a_different_one_is_refused(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "replies.jsonl"
    words = ["generate", "--input", str(prompts), "--output", str(output), "--max-tokens", "6", "--num-replies", "2"]
    assert main(words) == 0
    whole = output.read_bytes()
    for size in (0, 1000, len(whole) // 2, len(whole) - 3, len(whole)):
        output.write_bytes(whole[:size])
        assert main([*words, "--resume"]) == 0
        assert output.read_bytes() == whole
    capsys.readouterr()
    assert main([*words, "--resume", "--stop", "x"]) == 2
    assert main([*words, "--resume", "--seed", "1"]) == 2
    assert "the reply to prompt 1 belongs to another prompt, model or setting" in capsys.readouterr().err
    prompts.write_text("\n".join(prompts.read_text().splitlines()[:3]) + "\n")
    assert main([*words, "--resume"]) == 2
    assert "has no prompt now: the input has 3 prompts" in capsys.readouterr().err
    output.write_text('{"other": 1}\n{"other": 2}\n')
    assert main([*words, "--resume"]) == 2
    assert "was not written by this command" in capsys.readouterr().err
    assert output.read_text() == '{"other": 1}\n{"other": 2}\n'


@pytest.mark.parametrize("line", ["[" * 100_000, "5", '"text"', "[]", "9" * 5000, '{"digest": [1]}'])
def test_an_output_of_something_else_is_not_resumed(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    output = tmp_path / "replies.jsonl"
    output.write_text(f"{line}\n")
    assert main(["generate", "--input", str(prompts), "--output", str(output), "--resume"]) == 2
    error = capsys.readouterr().err
    assert "the reply to prompt 1 " in error and error.count("\n") == 1 and output.read_text() == f"{line}\n"


def test_an_output_that_is_no_file_is_refused(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["generate", "--input", str(prompts), "--output", str(tmp_path / "pipe"), "--resume"]) == 2
    assert "is a folder or a device" in capsys.readouterr().err


def test_prompts_without_a_reply_are_counted_and_an_invalid_row_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "prompts.jsonl", tmp_path / "replies.jsonl"
    words = ["generate", "--input", str(path), "--output", str(output), "--max-tokens", "4"]
    path.write_text('{"prompt": "Hello"}\n' + json.dumps({"prompt": "x" * 5000}) + "\n")
    assert main(words) == 1
    assert "1 of them have an `error` in place of a reply" in capsys.readouterr().err
    assert "error" in read(output)[1] and "error" not in read(output)[0]
    path.write_text(path.read_text() + '{"prompt": 3}\n')
    assert main([*words, "--resume"]) == 2
    assert "line 3: column 'prompt' is a list of messages or a text" in capsys.readouterr().err
    path.write_text('{"promt": "Hello"}\n')
    assert main(["generate", "--input", str(path), "--output", str(tmp_path / "new.jsonl")]) == 2
    assert "has no column for the prompt" in capsys.readouterr().err
    assert main(["generate", "--input", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "new.jsonl")]) == 2
    assert "no file" in capsys.readouterr().err


HOLD = """
import sys
from pathlib import Path
from agentgym.rollout.record.folder_lock import FolderLock
lock = FolderLock.of_file(Path(sys.argv[1]))
lock.take()
print("taken", flush=True)
sys.stdin.read()
"""


def test_a_file_that_another_process_writes_is_left_to_it(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "replies.jsonl"
    words = ["generate", "--input", str(prompts), "--output", str(output), "--max-tokens", "2"]
    command = [sys.executable, "-c", HOLD, str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        for more in ([], ["--resume"]):
            assert main([*words, *more]) == 2
            assert f"process {process.pid} on" in capsys.readouterr().err and not output.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_what_is_no_file_of_replies_is_named_and_left_alone(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    (tmp_path / "link.jsonl").symlink_to(victim)
    os.mkfifo(tmp_path / "fifo.jsonl")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    for name, message in {
        "link": "is a link",
        "fifo": "a folder or a device",
        "deep": "was not written by this command",
    }.items():
        output = tmp_path / f"{name}.jsonl"
        assert main(["generate", "--input", str(prompts), "--output", str(output), "--resume"]) == 2
        assert message in capsys.readouterr().err
    assert victim.read_text() == "precious\n"


@pytest.mark.long
def test_a_killed_command_is_resumed(tmp_path: Path) -> None:
    path, output = tmp_path / "prompts.jsonl", tmp_path / "replies.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {number}."}) + "\n" for number in range(800)))
    words = ["generate", "--input", str(path), "--output", str(output), "--max-tokens", "8", "--concurrency", "16"]
    process = subprocess.Popen([sys.executable, "-m", "agentgym", *words], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not output.exists() or output.stat().st_size < 2000:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    lines_before = output.read_bytes().splitlines()[:-1]
    assert 0 < len(lines_before) < 800
    assert main([*words, "--resume"]) == 0
    lines = output.read_bytes().splitlines()
    assert lines[: len(lines_before)] == lines_before and len(lines) == 800
    assert [json.loads(line)["messages"][0]["content"] for line in lines] == [f"Say {n}." for n in range(800)]


def test_servers_sample_for_evaluations_and_prompts(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeSglang() as server:
        url = ["--engine", "sglang", "--server.urls", server.url]
        run = tmp_path / "eval"
        words = ["eval", "--env", "TextGame-v0", "-n", "3", "--max-turns", "2", "--output", str(run), "--min-p", "0.1"]
        assert main([*words, *url]) == 0
        assert "engine: sglang" in (run / "config.yaml").read_text()
        assert "min_p: 0.1" in (run / "config.yaml").read_text()
        output = tmp_path / "replies.jsonl"
        assert main(["generate", "--input", str(prompts), "--output", str(output), "--max-tokens", "4", *url]) == 0
        assert len(read(output)) == 20
    capsys.readouterr()
    assert main(["eval", "--env", "TextGame-v0", "--policy", "oracle", "--engine", "vllm"]) == 2
    assert "engine vllm samples from a model, and oracle plays" in capsys.readouterr().err


def test_a_smaller_window_is_that_of_the_evaluation(tmp_path: Path) -> None:
    small = agentgym.evaluate("TextGame-v0", num_tasks=2, context_window=200, output=tmp_path / "small")
    assert all(trajectory.num_tokens <= 200 for trajectory in small.trajectories)
    assert {trajectory.stop_reason for trajectory in small.trajectories} & {"context", "env_error"}
