"""Replies that a stop string ends: the sampled ids up to the one that completes it, in the loop and in the record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.engines.protocol import Completion, Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.history import History
from agentgym.rollout.episode.token_loop import RolloutLoop, end_at_stop
from agentgym.rollout.limits import Limits, SamplingConfig
from agentgym.rollout.record.episodes_file import EpisodeWriter, read_episodes
from agentgym.trajectory import Source, Trajectory
from agentgym.types import MalformedCall, Task

Raw = Callable[[str], list[int]]
END = "<|im_end|>"
STOP = SamplingConfig(stop=("</answer>",))


class Ask(TextEnv):
    """Says what it was told; ends after two turns."""

    runs_inline = True
    own_split = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return "Answer.", {}

    def step(self, action: str) -> StepResult:
        return f"You said {action!r}", 1.0, self.turns == 2, False, {}


def play(
    renderer: Renderer, reply: Sequence[int], sampling: SamplingConfig = STOP, history: History = "append"
) -> Trajectory:
    loop = RolloutLoop(ScriptedEngine(lambda *_: reply), renderer, Limits(), sampling, history=history)
    return asyncio.run(loop.run(Ask(), Episode(Task("Ask-v0", 7))))


def replies(trajectory: Trajectory) -> list[list[int]]:
    return [list(span.ids) for row in trajectory.rows for span in row.spans if span.source is Source.POLICY]


@pytest.mark.parametrize("after", ["", " and so on", END])
def test_a_reply_ends_with_the_id_that_completes_its_stop_string(renderer: Renderer, raw: Raw, after: str) -> None:
    whole = raw("It is <answer>7</answer>")
    trajectory = play(renderer, [*whole, *raw(after)])
    assert replies(trajectory) == [whole, whole]
    turn = trajectory.turns[0]
    assert (turn.message.content, turn.finish_reason, turn.stop) == ("It is <answer>7</answer>", "stop", "</answer>")
    (row,) = trajectory.rows
    assert int(row.mask.sum()) == 2 * len(whole)
    assert f"</answer>{END}\n<|im_start|>user\nYou said" in renderer.decode(row.ids.tolist())


def test_without_its_string_a_reply_ends_as_ever(renderer: Renderer, raw: Raw) -> None:
    reply = raw("north" + END)
    assert play(renderer, reply) == play(renderer, reply, SamplingConfig())
    assert play(renderer, reply).turns[0].stop == ""


@pytest.fixture(scope="module")
def wide(tokenizer: ChatTokenizer) -> Renderer:
    """A renderer whose tokenizer has "> and" as one id."""
    backend = Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_tokens([AddedToken("> and", normalized=False)])
    return renderer_for(replace(tokenizer, backend=backend))


def wide_ids(wide: Renderer, text: str) -> list[int]:
    assert isinstance(wide, TemplateRenderer)
    return wide.tokenizer.encode(text)


@pytest.mark.parametrize("history", ["append", "rerender"])
def test_text_after_the_string_is_sampled_and_not_said(wide: Renderer, tmp_path: Path, history: History) -> None:
    whole = wide_ids(wide, "<answer>7</answer> and")
    trajectory = play(wide, [*whole, *wide_ids(wide, f" more{END}")], history=history)
    assert replies(trajectory) == [whole, whole]
    assert [turn.message.content for turn in trajectory.turns] == ["<answer>7</answer>"] * 2
    assert len(trajectory.rows) == (1 if history == "append" else 2), "the template writes what was said"
    with EpisodeWriter(tmp_path) as writer:
        writer.write([trajectory])
    assert verify_run(tmp_path, wide).ok


@pytest.mark.parametrize("stop", ["hm", '"name"', "</think>"])
def test_reasoning_and_calls_are_text_like_any_other(renderer: Renderer, raw: Raw, stop: str) -> None:
    reply = raw(f'<think>\nhm, well\n</think>\n\n<tool_call>\n{{"name": "go", "arguments": {{}}}}\n</tool_call>{END}')
    turn = play(renderer, reply, SamplingConfig(stop=(stop,))).turns[0]
    assert turn.stop == stop
    if stop == '"name"':
        (call,) = turn.message.tool_calls
        assert isinstance(call, MalformedCall) and call.raw.endswith(stop)
    else:
        assert not turn.message.tool_calls


def test_a_string_across_an_interruption_ends_the_reply(renderer: Renderer, raw: Raw) -> None:
    whole = raw("one</answer> two" + END)

    async def run() -> Trajectory:
        engine = ScriptedEngine(lambda *_: whole, token_s=0.002, on_update="abort")
        loop = RolloutLoop(engine, renderer, sampling=STOP)
        playing = asyncio.ensure_future(loop.run(Ask(), Episode(Task("Ask-v0", 7))))
        for version in range(1, 40):
            await asyncio.sleep(0.006)
            await engine.update_weights({}, version)
        return await playing

    trajectory = asyncio.run(run())
    assert replies(trajectory) == [raw("one</answer>")] * 2
    assert len(set(trajectory.rows[0].policy_versions.tolist())) > 2


def test_logprobs_versions_and_experts_are_cut_with_the_ids(renderer: Renderer, raw: Raw) -> None:
    ids = tuple(raw("a</answer>b"))
    sampling = STOP.for_reply(99, seed=0, renderer=renderer)
    logprobs = tuple(-index / 8 for index in range(len(ids)))
    cut = asyncio.run(end_at_stop(Completion(ids, logprobs, tuple(range(len(ids))), "length"), sampling))
    num_ids = len(raw("a</answer>"))
    assert cut == Completion(ids[:num_ids], logprobs[:num_ids], tuple(range(num_ids)), "stop", None, "</answer>")
    assert asyncio.run(end_at_stop(cut, replace(sampling, stop=()))) is cut


def test_the_record_keeps_the_string_and_another_one_is_found(renderer: Renderer, raw: Raw, tmp_path: Path) -> None:
    trajectory = play(renderer, raw(f"<answer>7</answer> 8{END}"))
    with EpisodeWriter(tmp_path) as writer:
        writer.write([trajectory])
    (record,) = read_episodes(tmp_path)
    assert record.trajectory == trajectory
    assert verify_run(tmp_path, renderer).ok
    line = json.loads((tmp_path / "episodes.jsonl").read_text())
    assert line["turns"][0].pop("stop") == "</answer>"
    for stop in ("", "</answer", "answer", "8", "never"):
        line["turns"][0] |= {"stop": stop} if stop else {}
        (tmp_path / "episodes.jsonl").write_text(json.dumps(line) + "\n")
        failed = {verdict.about.name for verdict in verify_run(tmp_path, renderer).verdicts if not verdict.ok}
        assert "stop_token" in failed


def test_an_engine_of_this_process_is_given_what_finds_them(renderer: Renderer, raw: Raw) -> None:
    samplings: list[Sampling] = []

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        samplings.append(sampling)
        return raw("hi" + END)

    asyncio.run(RolloutLoop(ScriptedEngine(reply), renderer, sampling=STOP).run(Ask(), Episode(Task("Ask-v0", 7))))
    assert samplings[0].stop == ("</answer>",) and samplings[0].decode is not None
    assert samplings[0].decode(raw("hi")) == "hi"
