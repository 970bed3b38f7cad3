"""CPU milliseconds per turn of the rollout loop, with an engine that answers at once.

Counts the process CPU time of everything: rendering, parsing, the environment's step, the event loop. The reference
row is the least that any loop must do for the same turns: render, extend, parse and step, one after the other,
without events, limits or records.

With --peers the loops of SkyRL and TRL play the same walk beside it: the same tokenizer and template, the same replies
of an engine that answers at once, 1,024 episodes of 16 turns. They live in environments of their own, which the first
run makes (`peer_environments.py`). All are warmed up, and take turns.

    python benchmarks/rollout.py [--json] [--peers]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer_environments import run_beside
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import agentgym.chat_templates
from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.action import Action
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.rollout.episode.replies import reply_ids
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.sampling.sampler import Sampler, SamplerConfig
from agentgym.tools.calling.definition import tool
from agentgym.types import Message, Task, ToolCall

CONCURRENT = 1024
TARGET_MS = 0.3
CALL = '<tool_call>\n{"name": "look", "arguments": {"direction": "north"}}\n</tool_call>'
REPLY = Message("assistant", "", tool_calls=(ToolCall("call_0", "look", {"direction": "north"}),))
MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


SYSTEM = "You walk through rooms."
FIRST = "You stand in a hall. There are doors to the north and to the east."
ROOM = "To the {direction} there is a room with a lamp, a table and a closed door."
PEERS = {"SkyRL": ("skyrl-0.3", "rollout_skyrl.py"), "TRL": ("trl-1.16", "rollout_trl.py")}


class Walk(ToolEnv):
    """Walks for `num_turns` turns; one short tool, computed at once."""

    runs_inline = True
    system_prompt = SYSTEM

    def __init__(self, num_turns: int) -> None:
        super().__init__()
        self.num_turns = num_turns

    def start(self, options: dict[str, object]) -> str:
        """The first room."""
        self.count = 0
        return FIRST

    @tool
    def look(self, direction: str) -> str:
        """Looks in a direction."""
        self.count += 1
        if self.count == self.num_turns:
            self.end(success=True, reward=1.0)
        return ROOM.format(direction=direction)


class Blocking(TextEnv):
    """A sync environment that does not promise to be quick: every call hops to its thread and back."""

    system_prompt = SYSTEM

    def __init__(self, num_turns: int) -> None:
        super().__init__()
        self.num_turns = num_turns

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """The first room."""
        self.count = 0
        return FIRST, {}

    def step(self, action: str) -> StepResult:
        """One turn."""
        self.count += 1
        return "A room with a lamp, a table and a closed door.", 0.0, self.count == self.num_turns, False, {}


class Inline(Blocking):
    """The same on the event loop."""

    runs_inline = True


def make_tokenizer() -> ChatTokenizer:
    """Makes the chat format of the embedded model over a small tokenizer that is trained on the spot."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([CALL, Walk.look.__doc__ or "", *[FIRST] * 20], trainer)
    backend.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    template = (Path(agentgym.chat_templates.__file__).parent / "embedded.jinja").read_text(encoding="utf-8")
    return ChatTokenizer(backend, template, special_tokens={"eos_token": "<|im_end|>"})


def make_renderer() -> Renderer:
    """Makes the renderer of that tokenizer."""
    return renderer_for(make_tokenizer())


def measure(renderer: Renderer, make: Callable[[int], TextEnv], num_turns: int, concurrency: int) -> float:
    """Returns CPU milliseconds per turn of `concurrency` episodes of `num_turns` turns each."""
    reply = reply_ids(renderer, REPLY)
    engine = ScriptedEngine(lambda session, prompt_ids, sampling: reply)
    loop = RolloutLoop(engine, renderer, Limits(max_turns=num_turns + 1))
    sampler = Sampler(loop, lambda task: make(num_turns), SamplerConfig(concurrency=concurrency))
    group_size = min(8, concurrency)
    tasks = [Task("Walk-v0", seed) for seed in range(concurrency // group_size)]
    started = time.process_time()
    groups = asyncio.run(sampler.sample(tasks, group_size))
    used_s = time.process_time() - started
    sampler.close()
    played = sum(len(trajectory.turns) for group in groups for trajectory in group.trajectories)
    assert played == concurrency * num_turns, "an episode did not take its turns"
    return 1000 * used_s / played


def least(renderer: Renderer, make: Callable[[int], TextEnv], num_turns: int, concurrency: int) -> float:
    """Returns the same for the turns without a loop around them."""
    reply = reply_ids(renderer, REPLY)
    started = time.process_time()
    for seed in range(concurrency):
        env = make(num_turns)
        _, info = env.reset(seed=seed)
        ids = renderer.render([Message("system", env.system_prompt), *info["messages"]], env.tool_specs)
        over = False
        while not over:
            ids.extend(reply)
            _, _, over, _, info = env.step(Action.from_message(renderer.parse(reply)))
            ids.extend(renderer.extend(ids, info["messages"]))
        env.close()
    return 1000 * (time.process_time() - started) / (concurrency * num_turns)


def run_peers(tokenizer: ChatTokenizer, num_turns: int, num_rounds: int) -> dict[str, list[float]]:
    """Returns CPU milliseconds per turn of our loop and of its peers', one number for each round."""
    costs: dict[str, list[float]] = {name: [] for name in ("ours", *PEERS)}
    renderer = renderer_for(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend,
            eos_token="<|im_end|>",
            pad_token="<|im_end|>",
            chat_template=tokenizer.template,
        ).save_pretrained(folder)
        spec = {
            "tokenizer": folder,
            "reply": reply_ids(renderer, REPLY),
            "episodes": CONCURRENT,
            "turns": num_turns,
            "system": SYSTEM,
            "first": FIRST,
            "observation": ROOM,
        }
        for _ in range(num_rounds):
            costs["ours"].append(measure(renderer, Walk, num_turns, CONCURRENT))
            for name, (environment, script) in PEERS.items():
                costs[name].append(run_beside(environment, Path(__file__).with_name(script), spec)["ms"])
    return costs


def main() -> None:
    """Prints the table, and with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--peers", action="store_true", help="the loops of SkyRL and TRL instead of the table")
    parser.add_argument("--rounds", type=int, default=3, help="of --peers (default 3)")
    arguments = parser.parse_args()
    renderer = make_renderer()
    measure(renderer, Walk, 2, 64)
    if arguments.peers:
        costs = run_peers(make_tokenizer(), 16, arguments.rounds)
        for name, values in costs.items():
            ratio = statistics.median(costs["ours"]) / statistics.median(values)
            spread = "".join(f"{value:>8.3f}" for value in (min(values), statistics.median(values), max(values)))
            print(f"{name:<8}{spread} ms per turn, ours is {ratio:.2f}")
        if arguments.json:
            print(json.dumps(costs))
        return
    rows: dict[str, float] = {}
    print(f"{'environment':<12}{'episodes':>9}{'turns':>7}{'ms/turn':>9}{'bare':>7}{'ratio':>7}")
    cases = [(Walk, CONCURRENT, turns) for turns in (4, 16, 64)] + [(Walk, 1, 64), (Walk, 64, 16)]
    cases += [(Inline, 64, 16), (Blocking, 64, 16), (Blocking, CONCURRENT, 16)]
    for make, concurrency, num_turns in cases:
        ours = measure(renderer, make, num_turns, concurrency)
        bare = least(renderer, make, num_turns, concurrency)
        rows[f"{make.__name__}/{concurrency}/{num_turns}"] = ours
        print(f"{make.__name__:<12}{concurrency:>9}{num_turns:>7}{ours:>9.3f}{bare:>7.3f}{ours / bare:>7.2f}")
    hop_us = 1000 * (rows["Blocking/64/16"] - rows["Inline/64/16"])
    flat = rows[f"Walk/{CONCURRENT}/64"] / rows[f"Walk/{CONCURRENT}/4"]
    print(f"a hop to a thread and back: {hop_us:.0f} us; 64 turns against 4: {flat:.2f}; target {TARGET_MS} ms")
    if arguments.json:
        print(json.dumps({"ms_per_turn": rows, "hop_us": hop_us, "flatness": flat}))


if __name__ == "__main__":
    main()
