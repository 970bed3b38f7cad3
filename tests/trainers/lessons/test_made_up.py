"""Made-up conversations, and the recipe of the model that learns from them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from safetensors.torch import load_file

from agentgym.chat_templates import renderer_for
from agentgym.embedded import EMBEDDED_LARGE, embedded_folder
from agentgym.trainers.lessons import make_embedded_large as recipe
from agentgym.trainers.lessons.made_up.conversations import encode_dialogue, made_up_conversation
from agentgym.trainers.lessons.made_up.toolbox import Dialogue
from agentgym.trainers.lessons.made_up.writing import is_written

SEEDS = range(120)
PIECES = ("stra", "we", "qu", "lo")


def conversation(seed: int) -> Dialogue:
    return made_up_conversation(seed, PIECES, is_easy=seed % 4 == 0)


def text_before(dialogue: Dialogue, place: int) -> str:
    return "\n".join(message.content for message in dialogue.messages[:place])


def test_a_seed_gives_one_conversation_and_another_seed_another() -> None:
    texts = [repr(conversation(seed)) for seed in SEEDS]
    assert texts == [repr(conversation(seed)) for seed in SEEDS]
    assert len(set(texts)) == len(texts)


def test_every_call_is_of_a_tool_of_the_conversation_and_fits_its_schema() -> None:
    num_calls = 0
    for seed in SEEDS:
        dialogue = conversation(seed)
        tools = {tool.name: tool.parameters for tool in dialogue.tools}
        assert len(tools) == len(dialogue.tools)
        for place, message in enumerate(dialogue.messages):
            for call in message.tool_calls if place not in dialogue.mistakes else ():
                Draft202012Validator(tools[call.name]).validate(call.arguments)
                num_calls += 1
    assert num_calls > len(SEEDS)


def test_texts_and_long_numbers_of_a_call_are_on_the_page_before_it() -> None:
    """Numbers that are computed have up to five digits, as those that they are computed from have up to four."""
    num_found = 0
    for seed in SEEDS:
        dialogue = conversation(seed)
        for place, message in enumerate(dialogue.messages):
            for value in (value for call in message.tool_calls for value in call.arguments.values()):
                if isinstance(value, bool) or (isinstance(value, int) and abs(value) < 10**5):
                    continue
                assert place in dialogue.mistakes or is_written(value, text_before(dialogue, place)), (seed, value)
                num_found += 1
    assert num_found > len(SEEDS)


def test_replies_are_learned_but_mistakes_are_not_and_all_are_read_back() -> None:
    renderer = renderer_for(embedded_folder(EMBEDDED_LARGE))
    num_mistakes = 0
    for seed in SEEDS:
        dialogue = conversation(seed)
        row = encode_dialogue(renderer, dialogue)
        spans = [place for place, (a, b) in enumerate(pairwise((False, *row.mask))) if a != b]
        spans += [len(row.mask)] * (len(spans) % 2)
        learned = [m for n, m in enumerate(dialogue.messages) if m.role == "assistant" and n not in dialogue.mistakes]
        assert len(spans) == 2 * len(learned)
        for start, end, message in zip(spans[::2], spans[1::2], learned, strict=True):
            reply = renderer.parse(row.ids[start:end], dialogue.tools)
            assert [(call.name, call.arguments) for call in reply.tool_calls] == [
                (call.name, call.arguments) for call in message.tool_calls
            ]
            assert reply.content == message.content
        num_mistakes += len(dialogue.mistakes)
    assert num_mistakes


def small_recipe(folder: Path) -> recipe.LargeRecipeConfig:
    """Copies the tokenizer, which takes the longest, and returns the settings of a recipe of seconds."""
    folder.mkdir()
    for file in embedded_folder(EMBEDDED_LARGE).glob("tokenizer*"):
        shutil.copy(file, folder)
    return recipe.LargeRecipeConfig(
        steps=6, easy_steps=3, batch_size=2, width=64, num_layers=1, ffn_width=32, save_every=2
    )


@pytest.mark.long
def test_the_recipe_goes_on_after_an_interruption_to_the_same_bits(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    config = small_recipe(whole)
    recipe.make_embedded_large(whole, config)
    assert small_recipe(cut) == config
    for last in (3, None):
        recipe.make_embedded_large(cut, replace(config, stop_after=last))
    weights = [load_file(folder / "model.safetensors") for folder in (whole, cut)]
    assert weights[0].keys() == weights[1].keys()
    assert all(tensor.equal(weights[1][name]) for name, tensor in weights[0].items())
    assert not [*tmp_path.glob("*/training.pt*")]


@pytest.mark.slow
def test_fifty_steps_of_the_recipe_learn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    recipe.make_embedded_large(tmp_path, replace(recipe.LargeRecipeConfig(), stop_after=50))
    losses = [float(line.split()[-1]) for line in caplog.messages if line.startswith("step ")]
    assert losses[0] < np.log(4096) and losses[-1] < 4.5, losses
    assert (tmp_path / "training.pt").exists()
