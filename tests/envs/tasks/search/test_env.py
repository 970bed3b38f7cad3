"""SearchQA-v0: questions that have one answer, which only reading finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentgym.envs import EVAL_SEED_START, Action, TextEnv, make_env, policy_for
from agentgym.envs.tasks.search.env import SearchQA
from agentgym.envs.tasks.search.world import RELATIONS, draw_search_question, make_search_world
from agentgym.errors import ConfigError
from agentgym.testing import examine_env
from agentgym.types import Message, ToolCall

LEVELS = (1, 2, 3, 4)


def say(env: TextEnv, tool: str, /, **arguments: Any) -> tuple[str, float, bool]:
    message = Message("assistant", "", tool_calls=(ToolCall("call_0", tool, arguments),))
    observation, reward, terminated, *_ = env.step(Action.from_message(message))
    return observation, reward, terminated


def played(env: TextEnv, kind: str, seed: int) -> tuple[float, int]:
    """Reward and turns of an episode."""
    observation, _ = env.reset(seed=seed)
    policy = policy_for(env, kind)
    policy.reset(env, observation, seed)
    total, ended = 0.0, False
    while not ended:
        observation, reward, terminated, truncated, _ = env.step(Action.from_message(policy.act(observation)))
        total, ended = total + reward, terminated or truncated
    return total, env.turns


@pytest.mark.slow
def test_every_claim_of_the_card_holds() -> None:
    verdicts = {verdict.check: verdict for verdict in examine_env("SearchQA-v0")}
    assert [verdict.findings for verdict in verdicts.values() if verdict.findings] == []
    assert {name for name, verdict in verdicts.items() if verdict.verdict == "not claimed"} == {"fork"}


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
def test_oracle_and_cheat_over_many_tasks(level: int) -> None:
    env = make_env("SearchQA-v0", {"level": level})
    for seed in (*range(10), *range(EVAL_SEED_START, EVAL_SEED_START + 5)):
        assert played(env, "oracle", seed) == (1.0, level + 2)
        assert played(env, "cheat", seed)[0] == 0.0


@pytest.mark.parametrize("level", LEVELS)
def test_each_page_on_the_way_names_the_next_and_no_other_page_answers_the_question(level: int) -> None:
    env = SearchQA(level=level)
    questions = set()
    for seed in range(12):
        env.reset(seed=seed)
        question, pages = env.question, {page.url: page.text for page in env.world.pages}
        questions.add(question.text)
        assert len(question.path) == level + 1 and len(pages) == len(env.world.entities)
        assert question.path[0].name in question.text and question.answer not in question.text
        for here, following in zip(question.path, question.path[1:], strict=False):
            assert following.name in pages[here.url]
        assert all(len(entity.name.split()) == 2 for entity in env.world.entities)
    assert len(questions) >= 11


def test_a_question_is_answered_by_following_the_pages() -> None:
    """The words of a question are followed back through the facts, and end at its answer."""
    for seed in range(40):
        draw = np.random.default_rng(seed)
        world = make_search_world(draw, 64)
        question = draw_search_question(draw, world, 3)
        text, path = question.text.removeprefix("What is the name of ").removesuffix("?"), []
        while not any(text == entity.name for entity in world.entities):
            ends = {kind: kind.phrase.split("{}") for kind in RELATIONS}
            (relation,) = [kind for kind, (begin, end) in ends.items() if text.startswith(begin) and text.endswith(end)]
            path.append(relation)
            text = text.removeprefix(ends[relation][0]).removesuffix(ends[relation][1])
        (here,) = [entity for entity in world.entities if entity.name == text]
        for relation in reversed(path):
            here = world.facts[here, relation]
        assert here.name == question.answer


def test_names_share_their_words_so_that_a_search_finds_namesakes() -> None:
    env = SearchQA(level=3)
    env.reset(seed=0)
    people = [entity.name for entity in env.world.entities if entity.kind == "person"]
    first = people[0].split()[0]
    assert len([name for name in people if name.startswith(f"{first} ")]) >= 2
    assert say(env, "search", query=first)[0].count("https://atlas.example/") == 3


def test_the_first_answer_counts_and_its_form_is_forgiven() -> None:
    env = SearchQA(level=1)
    for form, paid in (("{}", 1.0), (" {}. ", 1.0), ('"{}"', 1.0), ("the {}", 0.0), ("{} {}", 0.0), ("", 0.0)):
        env.reset(seed=5)
        name = env.question.answer
        assert say(env, "answer", name=form.format(name, name))[1:] == (paid, True)
    env.reset(seed=5)
    assert say(env, "answer", name=name.upper())[1:] == (1.0, True)
    env.reset(seed=5)
    calls = tuple(ToolCall(f"call_{n}", "answer", {"name": entity.name}) for n, entity in enumerate(env.world.entities))
    observation, reward, terminated, *_ = env.step(Action.from_message(Message("assistant", "", tool_calls=calls)))
    assert terminated and reward == float(env.world.entities[0].name == name)
    assert "not run: the episode is over" in observation


def test_what_is_not_recorded_is_not_read() -> None:
    env = SearchQA()
    env.reset(seed=0)
    for url in ("file:///etc/passwd", "http://127.0.0.1/", "", "../../etc/passwd"):
        observation, reward, ended = say(env, "fetch", url=url)
        assert "is recorded" in observation and (reward, ended) == (0.0, False)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="levels 1, 2, 3, 4; got level 5"):
        make_env("SearchQA-v0", {"level": 5})
