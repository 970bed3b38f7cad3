"""Before a lesson its player is tried: its success is printed, and one that fails in any way is one clear line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.errors import AgentGymError, ConfigError
from agentgym.rollout.limits import Limits
from agentgym.trainers.lessons.config import SftConfig
from agentgym.trainers.lessons.player_trial import try_player

DOOR = '''
import time

from agentgym.envs import ScriptedPolicy, ToolEnv
from agentgym.tools import tool
from agentgym.types import Message, ToolCall


class Door(ToolEnv):
    max_turns = 4
    runs_inline = True

    def start(self, options):
        self.number = int(self.np_random.integers(10**6))
        return f"The code is {self.number}."

    @tool
    def knock(self) -> str:
        """Knocks."""
        return "Silence."

    @tool
    def enter(self, code: int) -> str:
        """Enters a code."""
        self.end(success=code == self.number, reward=float(code == self.number))
        return "Done."
'''
GOOD = """
    def make_oracle(self):
        return ScriptedPolicy(self.solve)

    def solve(self, observation):
        yield "enter", {"code": self.number}
"""
SCRIPT = GOOD.partition("        yield")[0]
POLICY = """
    def make_oracle(self):
        return Player()


class Player:
    def reset(self, env, observation, seed):
        self.env, self.num_acts = env, 0

    def act(self, observation):
"""
ODD = {
    "there is none": ("", "Door has no oracle policy; give it a method make_oracle"),
    "it cannot be made": (
        "    def make_oracle(self): raise KeyError('plan')",
        "the oracle policy of Door failed with seed .*: KeyError: 'plan'",
    ),
    "it is none": ("    def make_oracle(self): return 3", "Door.make_oracle gave a int, not a Policy"),
    "it raises": (SCRIPT + "        yield self.nothing", "the oracle policy of Door failed .* no attribute 'nothing'"),
    "it yields a number": (SCRIPT + "        yield 7", r"Door.solve yielded 7: a reply is \(tool, arguments\), a text"),
    "it yields no arguments": (SCRIPT + "        yield 'enter', 7", r"Door.solve yielded \('enter', 7\)"),
    "it yields nothing": (SCRIPT + "        return 7", "Door.solve returned a int: a script yields its replies"),
    "it ends too soon": (
        SCRIPT + "        yield 'knock', {}",
        "Door.solve ended after reply 1, and the episode goes on",
    ),
    "it replies with a text": (POLICY + "        return 'enter'", "Player.act returned 'enter': a reply is a Message"),
    "it never succeeds": (
        SCRIPT + "        yield 'enter', {'code': -1}",
        "the oracle policy of .*door.py:Door succeeds in none of 32 tasks",
    ),
    "it hangs": (SCRIPT + "        while True: time.sleep(0.01)", "hangs: no reply within 0.5 s"),
    "it fails after mistakes": (
        POLICY
        + """
        if self.env.turns > self.num_acts:
            raise ValueError("this was not my move")
        self.num_acts += 1
        return Message("assistant", "", tool_calls=(ToolCall("a", "enter", {"code": self.env.number}),))
""",
        "this was not my move .*only after a mistake; --mistakes 0 plays none",
    ),
}
"""The ways in which an oracle may fail: its code, and what is said of it."""

Try = Callable[..., tuple[str, ...]]


@pytest.fixture
def try_door(tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Try:
    """`try_door(oracle, window=..., settings...)` returns the lines of a trial of an oracle's code."""
    monkeypatch.setattr("agentgym.trainers.lessons.player_trial.TRIAL_S", 600.0)  # on a busy machine too
    renderer = renderer_for(tokenizer_folder)
    assert isinstance(renderer, TemplateRenderer)

    def play(oracle: str, window: int = 4096, **settings: Any) -> tuple[str, ...]:
        (tmp_path / "door.py").write_text(DOOR + oracle, encoding="utf-8")
        config = SftConfig(env=f"{tmp_path / 'door.py'}:Door")
        return try_player(replace(config, **settings), renderer, window, 0)

    return play


@pytest.mark.parametrize("case", ODD)
def test_an_oracle_that_fails_is_one_line_before_anything_is_learned(case: str, try_door: Try) -> None:
    oracle, message = ODD[case]
    limits = Limits(env_step_s=0.5) if case == "it hangs" else Limits()
    with pytest.raises(AgentGymError, match=message) as caught:
        try_door(oracle, limits=limits)
    assert "\n" not in str(caught.value)


def test_the_success_of_the_player_alone_and_with_mistakes_is_told(try_door: Try) -> None:
    alone, mistakes, *rest = try_door(GOOD, mistakes=0.5)
    assert alone == "oracle: success 1.000 (32 of 32 tasks)"
    assert mistakes.startswith("with mistakes: success 0.") and "at 0.5 of the turns" in mistakes
    assert mistakes.endswith("these moves are not learned")
    assert [line.partition(":")[0] for line in rest] == ["words in pieces"], "a token of this tokenizer is a byte"
    alone, pieces = try_door(GOOD, mistakes=0.0)
    assert "mistakes" not in alone + pieces


def test_another_player_need_not_succeed(try_door: Try) -> None:
    first, *_ = try_door("", policy="random")
    assert first == "random: success 0.000 (0 of 32 tasks)"


def test_replies_that_play_would_cut_and_demonstrations_beyond_the_window_are_named(try_door: Try) -> None:
    *_, cut = try_door(GOOD, mistakes=0.0, limits=Limits(turn_tokens=4))
    assert cut.startswith("cut replies: the longest has ") and cut.endswith("in play 4 (--limits.turn-tokens)")
    with pytest.raises(ConfigError, match="fills the model's window of 30 tokens"):
        try_door(GOOD, window=30)
