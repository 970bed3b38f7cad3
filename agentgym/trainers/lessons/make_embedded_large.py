"""Makes the larger embedded model: `python -m agentgym.trainers.lessons.make_embedded_large --output FOLDER`.

It trains a tokenizer on the conversations of `made_up` and the bundled environments, then a Qwen3-architecture model by
imitation of made-up conversations, none of which it sees twice. Interrupted, the same command goes on.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import torch

from agentgym.chat_templates import renderer_for
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.embedded import embedded_folder
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.model_folder import save_model_folder
from agentgym.model.ops.cpu_products import has_bfloat16_products
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.lessons.batches import imitation_batch
from agentgym.trainers.lessons.made_up.conversations import made_up_conversation, made_up_rows
from agentgym.trainers.lessons.made_up.words import FIRST_NAMES, NOUNS, PLACES, VERBS, dictionary
from agentgym.trainers.lessons.make_embedded import corpus, make_tokenizer, run_recipe, without_marks
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

__all__ = ["LargeRecipeConfig", "make_embedded_large", "word_pieces"]

_log = logging.getLogger(__name__)

STATE = "training.pt"
"""The file with what an interrupted training goes on from; it is deleted at the end."""
TOKENIZER_SEED = 1 << 40
"""The seed of the first conversation of the tokenizer's text."""


@dataclass(frozen=True, kw_only=True)
class LargeRecipeConfig:
    """The recipe of `embedded-large`; docs/design.md says how the weights that ship came about."""

    seed: int = 0
    """The seed of the first conversation, and of the weights."""
    steps: int = 10_000
    easy_steps: int = 2_000
    """The first steps, whose conversations are easy: copying has to exist before the rest."""
    batch_size: int = 16
    """Conversations of a step."""
    learning_rate: float = 3e-3
    vocab_size: int = 4096
    width: int = 256
    num_layers: int = 6
    ffn_width: int = 768
    context_window: int = 2048
    save_every: int = 100
    """Steps between two states to go on from."""
    stop_after: int | None = None
    """Ends after this step as an interruption would; None ends after all steps."""


def make_embedded_large(output: Path, config: LargeRecipeConfig) -> None:
    """Makes tokenizer and model in `output`, or goes on there; with other settings than before, it must be empty."""
    output.mkdir(parents=True, exist_ok=True)
    if not (output / "tokenizer.json").exists():
        _log.info("tokenizer")
        make_tokenizer(output, _texts(), vocab_size=config.vocab_size, window=config.context_window)
    renderer = renderer_for(output)
    model = Decoder(_shape(renderer, config)).initialize(config.seed)
    _log.info("model of %.2f million parameters", model.num_parameters / 1e6)
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if has_bfloat16_products() else "float32"
    model = model.bfloat16() if dtype == "bfloat16" else model
    settings = LearnerConfig(loss="reinforce", dtype=dtype, micro_batch_tokens=1300)
    optimizer = OptimizerConfig(name="muon", learning_rate=config.learning_rate, warmup_steps=50, decay="linear")
    learner = Learner(model, settings, optimizer, total_steps=config.steps)
    done = _load(output, model, learner)
    first, num_easy = (config.seed + number * config.batch_size for number in (done, config.easy_steps))
    rows = made_up_rows(renderer, word_pieces(output), first, num_easy=num_easy)
    losses: list[float] = []
    for step in range(done + 1, config.steps + 1):
        batch = [row.first(config.context_window + 1) for row in islice(rows, config.batch_size)]
        losses.append(learner.update(imitation_batch(batch), version=step - 1).loss)
        if step % 20 == 0:
            _log.info("step %d  loss %.4f", step, sum(losses[-20:]) / 20)
        is_end = step in (config.steps, config.stop_after)
        if is_end or step % config.save_every == 0:
            _save(output, model, learner, step)
        if is_end:
            break
    learner.close()
    if done == config.steps or step == config.steps:
        (output / STATE).unlink(missing_ok=True)


def word_pieces(folder: Path) -> list[str]:
    """Returns the tokens of one to six small letters, of which a model cannot know how they go on."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return sorted(token for token in vocabulary if re.fullmatch(r"[a-z]{1,6}", token))


def _texts() -> Iterator[str]:
    """Yields the text that the tokenizer is trained on: made-up conversations, words, and the environments' own."""
    yield from dictionary() * 3
    yield from (*NOUNS, *VERBS, *FIRST_NAMES, *PLACES) * 40
    renderer = renderer_for(embedded_folder())  # of the same chat template
    for seed in range(TOKENIZER_SEED, TOKENIZER_SEED + 2000):
        dialogue = made_up_conversation(seed)
        yield from without_marks(renderer.text(dialogue.messages, dialogue.tools, generation_prompt=False))
    yield from corpus(100)


def _shape(renderer: TemplateRenderer, config: LargeRecipeConfig) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3",
        vocab_size=-(-renderer.vocab_size // 16) * 16,
        width=config.width,
        num_layers=config.num_layers,
        num_heads=config.width // 32,
        num_kv_heads=config.width // 64,
        head_width=32,
        ffn_width=config.ffn_width,
        context_window=config.context_window,
        qk_norm=True,
        rope_theta=1e6,
    )


def _save(output: Path, model: Decoder, learner: Learner, step: int) -> None:
    part = output / f"{STATE}.part"
    torch.save({"step": step, "model": model.state_dict(), "learner": learner.state_dict()}, part)
    os.replace(part, output / STATE)
    save_model_folder(model, output, dtype=torch.bfloat16)


def _load(output: Path, model: Decoder, learner: Learner) -> int:
    """Loads the state of an interrupted training; returns the number of its steps, or 0 if there is none."""
    if not (output / STATE).exists():
        return 0
    state = torch.load(output / STATE, weights_only=True)
    model.load_state_dict(state["model"])
    learner.load_state_dict(state["learner"])
    _log.info("going on after step %d", state["step"])
    return int(state["step"])


if __name__ == "__main__":
    run_recipe(make_embedded_large, LargeRecipeConfig)
