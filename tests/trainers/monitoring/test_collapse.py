"""Signs of collapse: scripted histories are named within three steps, healthy ones never."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ConfigError
from agentgym.trainers.monitoring.collapse import symptoms_of_collapse
from agentgym.trainers.monitoring.step_health import StepHealth
from agentgym.trainers.settings.collapse import SYMPTOMS, CollapseConfig, SymptomName

DATA = Path(__file__).parents[1] / "data"
CONFIG = CollapseConfig()
HEALTHY = StepHealth(
    groups=8,
    dead_groups=2,
    success=0.5,
    tool_calls=64,
    lost_calls=2,
    tool_calls_per_turn=1.0,
    repeated_ngrams=0.05,
    repeated_replies=0.2,
    entropy=0.3,
    clip_fraction=0.02,
    grad_norm=0.5,
    kl=0.02,
    merge_lost=0.3,
)
Change = Callable[[int], dict[str, Any]]
"""What the n-th step of a collapse, from 0, has other than a healthy one."""
COLLAPSES: dict[SymptomName, Change] = {
    "tool_faults": lambda n: {"tool_fault_share": 0.1 * (n + 1), "faulty_tool": "search"},
    "replies_cut": lambda n: {"episodes": 64, "replies_cut": 30 + n, "longest_reply": 128},
    "dead_groups": lambda n: {"dead_groups": 8, "success": 0.0, "grad_norm": None, "kl": None, "clip_fraction": None},
    "solved": lambda n: {"dead_groups": 8, "success": 1.0, "grad_norm": None, "kl": None, "clip_fraction": None},
    "format_lost": lambda n: {"lost_calls": 60},
    "tools_lost": lambda n: {"tool_calls": 3 - n, "lost_calls": 0, "tool_calls_per_turn": 0.05 / 10**n},
    "entropy_lost": lambda n: {"entropy": 0.003 / 10**n},
    "entropy_exploded": lambda n: {"entropy": 1.5 * 2**n},
    "repetition": lambda n: {"repeated_ngrams": 0.4 + 0.2 * n},
    "clipped": lambda n: {"clip_fraction": 0.95},
    "gradient_exploded": lambda n: {"grad_norm": 8.0 * 10**n},
    "kl_exploded": lambda n: {"kl": 3.0 * 3**n},
    "merge_lost": lambda n: {"merge_lost": 0.97 - n / 100},
}


def first_signs(history: list[StepHealth], config: CollapseConfig = CONFIG) -> dict[str, int]:
    """By name, the step (from 1) at which a symptom first stands."""
    first_steps: dict[str, int] = {}
    for end in range(1, len(history) + 1):
        for name in symptoms_of_collapse(history[:end], config):
            first_steps.setdefault(name, end)
    return first_steps


@pytest.mark.parametrize("name", COLLAPSES)
@pytest.mark.parametrize("healthy", [4, 40])
def test_a_scripted_collapse_is_named_within_three_steps_and_for_what_it_is(name: SymptomName, healthy: int) -> None:
    collapse = [replace(HEALTHY, **COLLAPSES[name](step)) for step in range(3)]
    first_steps = first_signs([HEALTHY] * healthy + collapse)
    assert list(first_steps) == [name]
    assert healthy < first_steps[name] <= healthy + 3


def test_every_sign_has_its_scripted_collapse_or_its_own_test() -> None:
    assert {*COLLAPSES, "nan", "no_format", "success_lost"} == set(SYMPTOMS)


@pytest.mark.parametrize(("groups", "step"), [(8, 10), (1, None)])
def test_a_fall_of_success_alone_is_named_where_chance_does_not_explain_it(groups: int, step: int | None) -> None:
    usual = replace(HEALTHY, success=0.9, groups=groups, dead_groups=0)
    history = [usual] * 8 + [replace(usual, success=0.3)] * 3
    assert first_signs(history) == ({"success_lost": step} if step else {})
    assert not first_signs([*[usual] * 8, replace(usual, success=0.3), *[usual] * 3])
    assert not first_signs([replace(usual, success=0.3)] * 4)


@pytest.mark.parametrize(("success", "name"), [(0.0, "dead_groups"), (1.0, "solved"), (0.5, "dead_groups")])
def test_dead_groups_from_the_first_step_on_are_named_by_their_success(success: float, name: str) -> None:
    dead = replace(HEALTHY, dead_groups=8, success=success)
    first_steps = first_signs([dead] * 3)
    assert list(first_steps) == [name] and first_steps[name] <= 3


def test_steps_whose_tokens_were_all_rejected_are_dead_and_named_with_the_cause() -> None:
    line = {"groups": 8, "dead_groups": 2, "success": 0.99, "loss": 0.0, "optimizer_steps": 0, "corrected_away": 1.0}
    rejected, dead = StepHealth.of(line), replace(HEALTHY, dead_groups=8, success=0.5)
    for history in ([HEALTHY, rejected, rejected], [HEALTHY, dead, rejected]):
        symptoms = symptoms_of_collapse(history, CONFIG)
        assert list(symptoms) == ["dead_groups"] and "rejected every token" in symptoms["dead_groups"]
    assert not symptoms_of_collapse([rejected, HEALTHY], CONFIG)
    assert not StepHealth.of({**line, "optimizer_steps": 1}).rejects_all, "another term of the loss was learned"
    assert not StepHealth.of({**line, "corrected_away": None}).rejects_all


def test_a_format_that_never_was_is_not_called_lost() -> None:
    broken = replace(HEALTHY, lost_calls=60)
    assert "agentgym sft" in symptoms_of_collapse([broken] * 2, CONFIG)["no_format"]
    assert "learning rate" in symptoms_of_collapse([HEALTHY, broken, broken], CONFIG)["format_lost"]


def test_cut_replies_are_named_before_their_consequences_with_the_setting() -> None:
    cut = replace(HEALTHY, episodes=64, replies_cut=60, longest_reply=256, success=0.0, dead_groups=8, lost_calls=60)
    symptoms = symptoms_of_collapse([cut] * 2, CONFIG)
    assert list(symptoms) == ["replies_cut", "dead_groups"]  # and not no_format, whose advice is wrong here
    assert (
        "120 replies in 128 episodes" in symptoms["replies_cut"]
        and "--limits.turn-tokens 1024" in symptoms["replies_cut"]
    )
    assert "limit" in symptoms["dead_groups"] and "easier" not in symptoms["dead_groups"]
    full = symptoms_of_collapse([replace(cut, replies_cut_by_window=60)] * 2, CONFIG)["replies_cut"]
    assert "context_window" in full and "turn-tokens" not in full


def test_a_reply_that_is_cut_now_and_then_is_no_sign() -> None:
    assert not first_signs([replace(HEALTHY, episodes=64, replies_cut=16, longest_reply=64)] * 4)


def test_a_few_calls_where_there_is_nothing_to_call_are_no_lost_format() -> None:
    toolless = replace(HEALTHY, tool_calls=2, lost_calls=2, tool_calls_per_turn=0.03)
    assert not first_signs([toolless] * 4)


def test_replies_that_an_agent_repeats_over_and_over_are_named() -> None:
    rising = [replace(HEALTHY, repeated_replies=0.2 + 0.3 * step) for step in range(1, 4)]
    (text,) = symptoms_of_collapse([HEALTHY] * 4 + rising, CONFIG).values()
    assert "an episode's own replies" in text


@pytest.mark.parametrize("path", sorted(DATA.glob("*.jsonl")), ids=lambda path: path.stem)
def test_recorded_healthy_runs_show_no_sign(path: Path) -> None:
    history = [StepHealth.of(json.loads(line)) for line in path.read_text().splitlines()]
    assert len(history) == 20 and history[-1].success > 0
    assert not first_signs(history)


@pytest.mark.parametrize("name", COLLAPSES)
def test_one_bad_step_is_no_collapse(name: SymptomName) -> None:
    bad = replace(HEALTHY, **COLLAPSES[name](1))
    assert not first_signs([HEALTHY] * 6 + [bad] + [HEALTHY] * 3)


ups = st.floats(0.7, 1.4)
healthy_steps = st.builds(
    lambda noise, dead, success, replies: replace(
        HEALTHY,
        dead_groups=dead,
        success=success,
        repeated_replies=replies,
        entropy=0.3 * noise,
        grad_norm=0.5 * noise**2,
        kl=0.02 * noise**4,
        tool_calls_per_turn=noise,
    ),
    noise=ups,
    dead=st.integers(0, 7),
    success=st.floats(0.3, 0.7),
    replies=st.floats(0.1, 0.39),
)


@given(st.lists(healthy_steps, max_size=12))
def test_noise_around_a_healthy_step_shows_no_sign(history: list[StepHealth]) -> None:
    assert not symptoms_of_collapse(history, CONFIG)


@given(st.integers(5, 60), st.floats(0.2, 0.6), st.floats(0.02, 0.1))
def test_a_run_that_learns_until_it_is_good_shows_no_sign(steps: int, entropy: float, end: float) -> None:
    """Success rises to 0.9, entropy falls, more and more groups are dead, replies grow alike."""
    ways = [step / (steps - 1) for step in range(steps)]
    history = [
        replace(
            HEALTHY,
            success=0.1 + 0.8 * way,
            dead_groups=round(7 * way),
            entropy=entropy * (end / entropy) ** way,
            repeated_replies=0.2 + 0.2 * way,
            grad_norm=0.5 * 0.2**way,
        )
        for way in ways
    ]
    assert not first_signs(history)


@given(st.lists(healthy_steps, min_size=3, max_size=12), st.sampled_from(sorted(COLLAPSES)))
def test_a_collapse_after_any_healthy_history_is_named_within_three_steps(
    history: list[StepHealth], name: SymptomName
) -> None:
    before = [replace(step, success=0.5) for step in history]
    collapse = [replace(HEALTHY, **COLLAPSES[name](step)) for step in range(1, 4)]
    assert name in first_signs(before + collapse)


@given(st.lists(healthy_steps, max_size=8), st.integers(1, 4))
def test_patience_is_how_many_steps_in_a_row_show_a_sign(history: list[StepHealth], patience: int) -> None:
    config = CollapseConfig(patience=patience)
    dead = replace(HEALTHY, dead_groups=8, success=0.0)
    assert "dead_groups" not in symptoms_of_collapse([*history, *[dead] * (patience - 1)], config)
    assert "dead_groups" in symptoms_of_collapse([*history, *[dead] * patience], config)


def test_steps_without_an_update_neither_hide_a_sign_nor_show_one() -> None:
    still = replace(HEALTHY, grad_norm=None, clip_fraction=None, kl=None)
    burst = replace(HEALTHY, grad_norm=50.0)
    assert not symptoms_of_collapse([HEALTHY] * 4 + [burst, still], CONFIG)
    assert "gradient_exploded" in symptoms_of_collapse([HEALTHY] * 4 + [burst, still, burst], CONFIG)


def test_a_lesson_that_is_learned_has_no_exploded_gradient() -> None:
    """Of 500 steps that imitate two tools, the median norm was 0.0027, and two in a row had 0.04."""
    learned, uneven = replace(HEALTHY, grad_norm=0.0027), replace(HEALTHY, grad_norm=0.04)
    assert not symptoms_of_collapse([learned] * 20 + [uneven] * 2, CONFIG)
    assert "gradient_exploded" in symptoms_of_collapse([learned] * 20 + [replace(HEALTHY, grad_norm=0.2)] * 2, CONFIG)


def test_an_entropy_that_creeps_away_is_held_against_the_first_steps() -> None:
    creeping = [replace(HEALTHY, entropy=0.3 * 1.05**step, success=0.5 - 0.004 * step) for step in range(60)]
    assert "entropy_exploded" in first_signs(creeping)


def test_what_rises_with_the_success_is_no_collapse() -> None:
    better = replace(HEALTHY, repeated_ngrams=0.6, entropy=1.5, success=0.8)
    assert not symptoms_of_collapse([HEALTHY] * 6 + [better] * 2, CONFIG)


@pytest.mark.parametrize(
    ("name", "quiet"),
    [("clipped", 0.99), ("gradient_exploded", 1e6), ("kl_exploded", 100), ("repetition", 0.9), ("tool_faults", 1.1)],
)
def test_a_threshold_moves_its_symptom(name: SymptomName, quiet: float) -> None:
    history = [HEALTHY] * 5 + [replace(HEALTHY, **COLLAPSES[name](step)) for step in range(2)]
    assert name in symptoms_of_collapse(history, CONFIG)
    assert name not in symptoms_of_collapse(history, CollapseConfig(thresholds={name: quiet}))


def test_settings_that_cannot_work_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="got 'dead_group': did you mean 'dead_groups'"):
        CollapseConfig(stop_on=("dead_group",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"collapse\.patience"):
        CollapseConfig(patience=0)
    refusals = {
        "kl_exploded": (0.0, "above 0, got 0"),
        "clipped": (-1.0, "above 0"),
        "tool_faults": ("much", "a number"),
    }
    for symptom, (value, words) in {**refusals, "gradient_exploded": (1.0, "above 1, got 1")}.items():
        with pytest.raises(ConfigError, match=rf"collapse\.thresholds {symptom} (must be|is) {words}"):
            CollapseConfig(thresholds={symptom: value})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="has no 'cliped': did you mean 'clipped'"):
        CollapseConfig(thresholds={"cliped": 0.5})


def test_a_line_without_the_newer_numbers_or_with_broken_ones_is_read() -> None:
    old = StepHealth.of({"success": 0.5, "dead_groups": 1, "entropy": float("nan"), "sampled_entropy": 0.2, "kl": None})
    assert (old.groups, old.entropy, old.kl, old.tool_calls_per_turn) == (0, 0.2, None, None)


def test_the_docs_explain_every_sign_and_no_other() -> None:
    text = (Path(__file__).parents[3] / "docs" / "collapse.md").read_text(encoding="utf-8")
    table = text[text.index("| Symptom |") : text.index("## What ends")]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(SYMPTOMS)
