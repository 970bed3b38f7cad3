"""A sound run verifies; damage of any kind is named by its property, with its place."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import agentgym.chat_templates
from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.embedded import embedded_folder
from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import ScriptedEngine, ScriptedReply
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.envs.games.guess_number import GuessNumber
from agentgym.errors import RunFolderError
from agentgym.evaluation.run_check.verify import PROPERTIES, verify_run
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.episode_digests import credit_digest
from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.rollout.record.tools_file import menu_digest, menu_lines
from agentgym.rollout.sampling.sampler import Sampler, SamplerConfig
from agentgym.types import Message, Task, ToolCall, ToolSpec

MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CALL = '<tool_call>\n{{"name": "guess", "arguments": {{"value": {}}}}}\n</tool_call>'
Lines = list[dict[str, Any]]
OF_THE_FOLDER = {"metrics", "chain", "settings", "checkpoints", "end", "report"}
"""Properties of a run's folder: there are none where only episodes are written."""


class Unlucky(GuessNumber):
    """Breaks at a reply without a call where its range begins with an even number."""

    def on_message(self, text: str) -> str:
        if self._low % 2 == 0:
            raise RuntimeError("the box is broken")
        return super().on_message(text)


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    """Byte-level BPE with a few merges, so that replies sampled byte by byte encode to other ids when decoded."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ue", "gu", "es", "al", "nam"]
    merges = [("u", "e"), ("g", "u"), ("e", "s"), ("a", "l")]
    backend = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(symbols)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    template = (Path(agentgym.chat_templates.__file__).parent / "embedded.jinja").read_text(encoding="utf-8")
    return ChatTokenizer(backend, template, special_tokens={"eos_token": "<|im_end|>"})


@pytest.fixture(scope="module")
def renderer(tokenizer: ChatTokenizer) -> Renderer:
    return renderer_for(tokenizer)


def sampled(backend: Tokenizer, text: str) -> list[int]:
    """The ids of a text, byte by byte, marks whole."""
    parts = re.split(f"({'|'.join(map(re.escape, MARKS))})", text)
    return [i for part in parts for piece in ([part] if part in MARKS else part) for i in backend.encode(piece).ids]


def play(run: Path, tokenizer: ChatTokenizer, renderer: Renderer, *, num_tasks: int, num_steps: int = 2) -> Path:
    """Plays and records groups of four: good, doubled and malformed calls, plain text, cut replies, broken episodes."""
    rng = random.Random(3)

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> ScriptedReply:
        low = int(re.findall(r"from (\d+) to", renderer.decode(prompt_ids))[0])
        good = CALL.format(low + rng.randrange(4))
        text = rng.choice(
            [
                good,
                good,
                good,
                good,
                good,
                f"I guess.\n{good}\n{good}",
                "guess",
                "<tool_call>\n{not json\n</tool_call>",
                "é" * 150,
            ]
        )
        ids = [*sampled(tokenizer.backend, text), *renderer.stop_ids[:1]]
        return ScriptedReply(ids, [-rng.random() for _ in ids])

    async def sample() -> None:
        engine = ScriptedEngine(reply, vocab_size=renderer.vocab_size)
        loop = RolloutLoop(engine, renderer, Limits(turn_tokens=256, max_turns=5))
        sampler = Sampler(loop, lambda task: Unlucky(), SamplerConfig(max_failure_rate=1.0))
        with EpisodeWriter(run) as writer:
            for step in range(num_steps):
                tasks = [Task("GuessNumber-v0", seed=10 * step + index) for index in range(num_tasks)]
                for group in await sampler.sample(tasks, 4, step=step):
                    advantages = [
                        [[0.5] * row.num_trained_tokens for row in trajectory.rows]
                        if trajectory.status.trainable
                        else None
                        for trajectory in group.trajectories
                    ]
                    writer.write(group.trajectories, step=step, advantages=advantages)
                await engine.update_weights({}, step + 1)

    asyncio.run(sample())
    return run


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory, tokenizer: ChatTokenizer, renderer: Renderer) -> Lines:
    """The lines of a sound run, played once, without their chain: their digests are those of the bytes of the file."""
    run = play(tmp_path_factory.mktemp("run"), tokenizer, renderer, num_tasks=6)
    lines = [json.loads(line) for line in (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name != "chain"} for line in lines]


def stored(run: Path, lines: Lines) -> Path:
    run.mkdir(exist_ok=True)
    tools = GuessNumber().tool_specs
    (run / "tools.jsonl").write_bytes(menu_lines({menu_digest(tools): tools}))
    (run / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return run


def test_a_sound_run_verifies_with_every_property_checked(tmp_path: Path, lines: Lines, renderer: Renderer) -> None:
    report = verify_run(stored(tmp_path, lines), renderer)
    assert report.ok, report.lines()
    assert report.num_episodes == len(lines) == 48
    assert {line["status"] for line in lines} == {"completed", "truncated", "env_error"}
    assert {verdict.about.name for verdict in report.verdicts if verdict.skipped} == OF_THE_FOLDER, report.lines()
    assert all(verdict.num_checked > 0 for verdict in report.verdicts if verdict.about.name not in OF_THE_FOLDER)
    assert report.lines()[-1].endswith("sound") and len(report.lines()) == len(PROPERTIES) + 1
    json.dumps(report.to_json(), allow_nan=False)


def test_without_a_renderer_the_report_lists_the_skipped_checks(tmp_path: Path, lines: Lines) -> None:
    report = verify_run(stored(tmp_path, lines))
    assert report.ok
    skipped = {verdict.about.name for verdict in report.verdicts if verdict.skipped}
    assert skipped == OF_THE_FOLDER | {"vocabulary", "prompt", "prefix", "stop_token", "reply"}
    assert sum("not checked: it needs the model's tokenizer" in line for line in report.lines()) == 5


def test_a_record_that_names_no_tools_and_no_messages_verifies_without_them(
    tmp_path: Path, lines: Lines, renderer: Renderer
) -> None:
    bare = copy.deepcopy(lines)
    for line in bare:
        for row in line["rows"]:
            del row["tools"], row["messages"]
    report = verify_run(stored(tmp_path, bare), renderer)
    assert report.ok, report.lines()
    assert {verdict.about.name for verdict in report.verdicts if verdict.skipped} == OF_THE_FOLDER | {"tools", "prompt"}


class _Untyped(TextEnv):
    """Has a tool that takes a number; its messages are not its observation."""

    runs_inline = True
    tool_specs = (ToolSpec("guess", "Guesses.", {"type": "object", "properties": {"value": {"type": "integer"}}}),)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return "Guess.", {}

    def step(self, action: str) -> StepResult:
        messages = (Message("user", "No."), Message("user", "Again."))
        return "wrong", 0.0, False, False, {"messages": messages}


def test_replies_are_read_again_with_the_tools_that_the_model_was_shown(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    """The family writes arguments without types: whether `7` is a number stands in the tool's schema alone."""
    renderer = TemplateRenderer(tokenizer, reply_format=FORMATS["qwen3_coder"])
    renderer.unread = ""  # the template writes calls in another form, and none is in the history
    text = "<tool_call>\n<function=guess>\n<parameter=value>\n7\n</parameter>\n</function>\n</tool_call><|im_end|>"
    engine = ScriptedEngine(lambda *_: sampled(tokenizer.backend, text), vocab_size=renderer.vocab_size)
    loop = RolloutLoop(engine, renderer, Limits(max_turns=2))
    (group,) = asyncio.run(Sampler(loop, lambda task: _Untyped()).sample([Task("GuessNumber-v0", seed=1)], 1))
    with EpisodeWriter(tmp_path) as writer:
        writer.write(group.trajectories)
    call = group.trajectories[0].turns[0].message.tool_calls[0]
    assert isinstance(call, ToolCall) and call.arguments == {"value": 7}
    report = verify_run(tmp_path, renderer)
    assert report.ok, report.lines()
    (tmp_path / "tools.jsonl").unlink()
    failed = {verdict.about.name for verdict in verify_run(tmp_path, renderer).verdicts if not verdict.ok}
    assert failed == {"tools", "reply"}


def test_replies_are_read_again_behind_the_prompts_that_they_were_sampled_on(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    """The template opens the reasoning behind a question and not behind a result."""
    ask = "{{- '<|im_start|>assistant\\n' -}}"
    opened = ask.replace(" -}}", " + ('<think>\\n' if messages[-1].role == 'user' else '') -}}")
    head, _, tail = tokenizer.template.rpartition(ask)
    renderer = TemplateRenderer(replace(tokenizer, template=head + opened + tail))
    texts = iter([f"Low?</think>{CALL.format(1)}<|im_end|>", "Oh.<|im_end|>"])
    engine = ScriptedEngine(lambda *_: sampled(tokenizer.backend, next(texts)), vocab_size=renderer.vocab_size)
    loop = RolloutLoop(engine, renderer, Limits(max_turns=2))
    (group,) = asyncio.run(Sampler(loop).sample([Task("GuessNumber-v0", seed=1)], 1))
    replies = [(turn.message.reasoning, turn.message.content) for turn in group.trajectories[0].turns]
    assert replies == [("Low?", ""), (None, "Oh.")]
    with EpisodeWriter(tmp_path) as writer:
        writer.write(group.trajectories)
    report = verify_run(tmp_path, renderer)
    assert report.ok, report.lines()


def span_of(line: dict[str, Any], source: str, index: int = 0) -> dict[str, Any]:
    source_span: dict[str, Any] = [span for span in line["rows"][0]["spans"] if span["source"] == source][index]
    return source_span


def change_reply_id(line: dict[str, Any]) -> None:
    span_of(line, "policy", 1)["ids"][3] ^= 1


def change_env_id(line: dict[str, Any]) -> None:
    span_of(line, "env")["ids"][4] ^= 1


def change_prompt_id(line: dict[str, Any]) -> None:
    span_of(line, "prompt")["ids"][4] ^= 1


def flip_mask_bit(line: dict[str, Any]) -> None:
    (zero, length), *rest = line["rows"][0]["mask"]
    line["rows"][0]["mask"] = [[zero, length - 2], [1, 1], [0, 1], *rest]


def drop_logprob(line: dict[str, Any]) -> None:
    span_of(line, "policy", 1)["logprobs"].pop()


def change_logprob(line: dict[str, Any]) -> None:
    span_of(line, "policy", 1)["logprobs"][0] -= 1e-9


def id_out_of_range(line: dict[str, Any]) -> None:
    span_of(line, "env")["ids"][2] = 10**6


def version_falls(line: dict[str, Any]) -> None:
    span_of(line, "policy")["policy_versions"][0] = 7


def drop_stop_id(line: dict[str, Any]) -> None:
    for values in ("ids", "logprobs", "policy_versions"):
        span_of(line, "policy", 1)[values].pop()


def change_message(line: dict[str, Any]) -> None:
    line["turns"][1]["message"]["content"] += "!"


def trained_prompt(line: dict[str, Any]) -> None:
    span_of(line, "env")["source"] = "policy"


def zero_for_null(line: dict[str, Any]) -> None:
    line.update(status="env_error", stop_reason="env_error", error="broken", reward=0.0, advantages=None)


def change_reward(line: dict[str, Any]) -> None:
    line["reward"] += 1


def lose_error(line: dict[str, Any]) -> None:
    line["error"] = "what?"


def wrong_reason(line: dict[str, Any]) -> None:
    line["stop_reason"] = "deadline"


def drop_advantage(line: dict[str, Any]) -> None:
    line["advantages"][0].pop()


def change_advantage(line: dict[str, Any]) -> None:
    line["advantages"][0][-1] += 1e-6


def move_advantage(line: dict[str, Any]) -> None:
    line["advantages"][0].append(line["advantages"][0].pop(0) + 0.25)


def move_reward(line: dict[str, Any]) -> None:
    line["turns"][0]["reward"] += 0.5
    line["turns"][-1]["reward"] -= 0.5


def train_on_nothing(line: dict[str, Any]) -> None:
    line["advantages"] = None


def swap_answers(line: dict[str, Any]) -> None:
    line["turns"][0]["tool_results"][0]["call_id"] = "call_9"


def lose_answer(line: dict[str, Any]) -> None:
    call = line["turns"][0]["message"]["tool_calls"][0]
    line["turns"][0]["message"]["tool_calls"].append({**call, "id": "call_1"})


def other_tools(line: dict[str, Any]) -> None:
    line["rows"][0]["tools"] = "0" * 32


def change_told(line: dict[str, Any]) -> None:
    line["rows"][0]["messages"][-1]["content"] += "!"


def exclude_reply(line: dict[str, Any]) -> None:
    span_of(line, "policy", 1)["excluded"] = True


def other_task(line: dict[str, Any]) -> None:
    line["task"]["seed"] += 1000


def other_member(line: dict[str, Any]) -> None:
    line["member"] = (line["member"] + 1) % 4


def drop_field(line: dict[str, Any]) -> None:
    del line["turns"]


Damage = tuple[Callable[[dict[str, Any]], None], str, int | None, int | None]
DAMAGES: list[Damage] = [
    (change_reply_id, "reply", 1, None),
    (change_reply_id, "digest", None, None),
    (change_env_id, "prefix", 0, 4),
    (change_prompt_id, "first_prompt", None, 4),
    (flip_mask_bit, "mask", None, -2),
    (drop_logprob, "logprobs", 1, None),
    (change_logprob, "digest", None, None),
    (id_out_of_range, "vocabulary", 0, 2),
    (version_falls, "versions", 0, 1),
    (drop_stop_id, "stop_token", 1, None),
    (change_message, "reply", 1, None),
    (trained_prompt, "spans", None, None),
    (zero_for_null, "reward", None, None),
    (change_reward, "reward", None, None),
    (lose_error, "status", None, None),
    (wrong_reason, "trajectory", None, None),
    (drop_advantage, "advantages", None, None),
    (change_advantage, "credit", None, None),
    (move_advantage, "credit", None, None),
    (move_reward, "credit", None, None),
    (train_on_nothing, "credit", None, None),
    (swap_answers, "tool_answers", 0, None),
    (lose_answer, "tool_answers", 0, None),
    (other_tools, "tools", None, None),
    (change_told, "prompt", None, None),
    (exclude_reply, "mask", None, None),
    (other_task, "groups", None, None),
    (other_member, "groups", None, None),
    (drop_field, "readable", None, None),
]


@pytest.mark.long(cases=4)
@pytest.mark.parametrize("case", DAMAGES, ids=[f"{case[0].__name__}-{case[1]}" for case in DAMAGES])
def test_damage_is_named_with_its_place(tmp_path: Path, lines: Lines, renderer: Renderer, case: Damage) -> None:
    damage, name, turn, token = case
    lines = copy.deepcopy(lines)
    number, line = next(
        (number, line)
        for number, line in enumerate(lines, 1)
        if line["status"] == "completed" and len(line["turns"]) >= 2 and line["turns"][0]["tool_results"] and number > 8
    )
    before = [len(span["ids"]) for span in line["rows"][0]["spans"]]
    damage(line)
    report = verify_run(stored(tmp_path, lines), renderer)
    verdict = next(verdict for verdict in report.verdicts if verdict.about.name == name)
    assert not report.ok and not verdict.ok
    assert verdict.first is not None
    assert verdict.first.line in (range(number - 4, number + 5) if name in ("groups", "first_prompt") else [number])
    if turn is not None:
        assert verdict.first.turn == turn
    if damage is flip_mask_bit:
        assert verdict.first.token == before[0] - 2
    elif damage is exclude_reply:
        assert verdict.first.token == sum(before[:3])
    elif name == "versions":
        assert verdict.first.token == before[0] + 1
    elif token is not None:
        start = 0 if name == "first_prompt" else sum(before[:2])
        assert verdict.first.token == start + token
    assert any(text.startswith(f"FAILED {name}") for text in report.lines())


def test_an_id_without_a_text_may_be_sampled_and_never_be_written(
    tmp_path: Path, lines: Lines, tokenizer: ChatTokenizer
) -> None:
    """A model of 8 ids more than its tokenizer has, as many have, samples one of them now and then."""
    renderer = renderer_for(replace(tokenizer, num_sampled=tokenizer.vocab_size + 8))

    def findings(source: str, beyond: int) -> str | None:
        line = copy.deepcopy(next(line for line in lines if len(line["turns"]) > 1))
        span_of(line, source)["ids"][0] = tokenizer.vocab_size + beyond
        report = verify_run(stored(tmp_path, [line]), renderer)
        return next(verdict.first for verdict in report.verdicts if verdict.about.name == "vocabulary")

    assert findings("policy", 7) is None
    assert f"outside of the vocabulary of {tokenizer.vocab_size + 8}" in str(findings("policy", 8))
    assert f"outside of the vocabulary of {tokenizer.vocab_size}" in str(findings("env", 7))
    assert ChatTokenizer.load(embedded_folder()).num_sampled == 1984 > ChatTokenizer.load(embedded_folder()).vocab_size


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_single_id_can_change_unseen(tmp_path: Path, lines: Lines, data: st.DataObject) -> None:
    line = copy.deepcopy(data.draw(st.sampled_from([line for line in lines if line["rows"]])))
    span = data.draw(st.sampled_from(line["rows"][0]["spans"]))
    index = data.draw(st.integers(0, len(span["ids"]) - 1))
    span["ids"][index] = data.draw(st.integers(0, 260).filter(lambda value: value != span["ids"][index]))
    assert not verify_run(stored(tmp_path, [line])).ok


def test_a_torn_line_is_a_failure_with_its_place_and_the_rest_is_checked(tmp_path: Path, lines: Lines) -> None:
    run = stored(tmp_path, lines)
    path = run / "episodes.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    report = verify_run(run)
    readable = report.verdicts[0]
    assert (readable.num_checked, readable.num_failed) == (48, 1)
    assert readable.first is not None and readable.first.line == 48 and "torn" in readable.first.problem
    assert report.num_episodes == 47


def test_an_episode_that_failed_may_be_played_again(tmp_path: Path, lines: Lines) -> None:
    failed = next(line for line in lines if line["status"] == "env_error")
    good = next(line for line in lines if line["group"] == failed["group"] and line["step"] == failed["step"])
    again = {**copy.deepcopy(good), "member": failed["member"]}
    only = [{**failed, "member": 0}, {**again, "member": 0, "task": failed["task"]}]
    verdicts = {verdict.about.name: verdict for verdict in verify_run(stored(tmp_path, only)).verdicts}
    assert verdicts["groups"].ok


def test_the_numbers_of_a_step_follow_from_its_episodes(tmp_path: Path, lines: Lines) -> None:
    run = stored(tmp_path, lines)
    first = [line for line in lines if line["step"] == 0]
    rewards = [line["reward"] for line in first if line["reward"] is not None]
    sound = {"step": 0, "episodes": 24, "failed": 24 - len(rewards), "reward_mean": sum(rewards) / len(rewards)}
    (run / "metrics.jsonl").write_text(json.dumps(sound) + "\n", encoding="utf-8")
    assert verify_run(run).ok
    wrong = {**sound, "failed": 0, "reward_mean": sum(rewards) / 24}
    (run / "metrics.jsonl").write_text(json.dumps(sound) + "\n" + json.dumps(wrong) + "\n{", encoding="utf-8")
    (verdict,) = (verdict for verdict in verify_run(run).verdicts if verdict.about.name == "metrics")
    assert (verdict.num_checked, verdict.num_failed) == (3, 2)
    assert str(verdict.first).startswith("line 2: of metrics.jsonl: failed of step 0 is 0, its episodes give ")


def test_a_group_is_dead_where_nothing_was_credited_whatever_the_rewards(tmp_path: Path, lines: Lines) -> None:
    """A critic, a greedy episode or the components of a reward may credit a group whose rewards are equal."""
    first = [copy.deepcopy(line) for line in lines if line["step"] == 0]
    quiet = first[0]["group"]
    for line in first:
        if line["group"] == quiet and line["advantages"] is not None:
            line["advantages"] = [[0.0] * len(row) for row in line["advantages"]]
        line["credit"] = credit_digest([turn["reward"] for turn in line["turns"]], line["advantages"])
    run = stored(tmp_path, first)
    live = {line["group"] for line in first if line["status"] != "env_error"} - {quiet}
    num_dead = len({line["group"] for line in first}) - len(live)
    for number in (num_dead, num_dead - 1):
        (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "dead_groups": number}) + "\n", encoding="utf-8")
        assert verify_run(run).ok is (number == num_dead)


@pytest.mark.parametrize("rerender", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_cut_replies_and_rewritten_histories_verify_too(
    tmp_path: Path, tokenizer: ChatTokenizer, renderer: Renderer, rerender: bool, cut: bool
) -> None:
    """A cut reply gets its end from the template; a rewritten history (here: its JSON in other words) a new row."""
    text = (
        "I do not know " * 9 if cut else '<tool_call>\n{"name":"guess","arguments":{"value":1}}\n</tool_call><|im_end|>'
    )

    async def sample() -> None:
        engine = ScriptedEngine(lambda *_: sampled(tokenizer.backend, text), vocab_size=renderer.vocab_size)
        limits = Limits(turn_tokens=64, max_turns=3, cut_reply="answer")
        loop = RolloutLoop(engine, renderer, limits, history="rerender" if rerender else "append")
        groups = await Sampler(loop, lambda task: GuessNumber()).sample([Task("GuessNumber-v0", seed=1)], 2)
        with EpisodeWriter(tmp_path) as writer:
            writer.write(groups[0].trajectories)

    asyncio.run(sample())
    report = verify_run(tmp_path, renderer)
    assert report.ok, report.lines()
    record = json.loads((tmp_path / "episodes.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert [turn["finish_reason"] for turn in record["turns"]] == ["length" if cut else "stop"] * 3
    assert len(record["rows"]) == (3 if rerender and not cut else 1)


@pytest.mark.parametrize("name", ["empty", "missing", "nowhere"])
def test_a_folder_without_episodes_is_an_error(tmp_path: Path, name: str) -> None:
    run = tmp_path / name
    if name != "nowhere":
        run.mkdir()
    if name == "empty":
        (run / "episodes.jsonl").touch()
    with pytest.raises(RunFolderError, match=r"(is empty|has no episodes.jsonl|is not a folder).*wanted"):
        verify_run(run)
