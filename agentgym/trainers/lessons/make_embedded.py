"""Makes the embedded model: `python -m agentgym.trainers.lessons.make_embedded --output FOLDER`.

It trains a tokenizer on the environments' own text, and a small Qwen3-architecture model by imitation in three lessons.
The first has easy worlds, the second the whole game. Random moves disturb the play so that every situation is seen, but
only the player's own moves are learned. The third lesson makes the model careless: random moves are learned as well.
The model then knows the format and the game, but plays badly, which leaves reinforcement learning something to do.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, make_dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentgym.chat_templates import renderer_for
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.envs.base.action import Action
from agentgym.envs.base.policies import policy_for
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.catalog.resolve import make_env
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.model_folder import save_model_folder
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.lessons.batches import imitation_batch
from agentgym.trainers.lessons.demonstrations import DemonstrationConfig, stream
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

__all__ = ["RecipeConfig", "corpus", "make_embedded", "make_tokenizer", "run_recipe", "without_marks"]

_log = logging.getLogger(__name__)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# A word is one token in every position (without a space), so that copying a name from an observation into a call is
# copying one id. The JSON around a call, line labels and role names are pieces too, for short turns.
PIECES = "|".join(
    (
        r'\n?\{"[a-z]+": "?',
        r'", "[a-z]+": \{"?',
        r'", "',
        r'": "?',
        r'"?\}\}\n?',
        r"\n?[A-Z][a-z]+: ",
        r"(?:system|user|assistant|tool)\n",
        r"\p{L}+",
        r"\p{N}",
        r"[^\p{L}\p{N}]+",
    )
)

TEMPLATE_TEXT = ("\n\nTools:\n", "string)\n", "integer)\n", "any)\n", "Call: ", '{"name": tool, "arguments": {...}}')
"""The text that the chat template itself adds, for training the tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Imitation:
    """One lesson of the recipe."""

    steps: int
    batch_size: int = 8
    demonstrations: DemonstrationConfig
    optimizer: OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """The recipe; its defaults made the model that ships."""

    seed: int = 0
    vocab_size: int = 2048
    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_width: int = 384
    context_window: int = 1024
    copying: Imitation = field(
        default_factory=lambda: Imitation(
            steps=1000,
            demonstrations=DemonstrationConfig(mistakes=0.25),
            optimizer=OptimizerConfig(name="muon", learning_rate=3e-3, warmup_steps=30),
        )
    )
    """Easy worlds, where naming the right thing is most of the play: copying a word has to exist before the rest."""
    clean: Imitation = field(
        default_factory=lambda: Imitation(
            steps=2000,
            demonstrations=DemonstrationConfig(mistakes=0.25),
            optimizer=OptimizerConfig(name="muon", learning_rate=3e-3, warmup_steps=1, decay="linear"),
        )
    )
    """The whole game, played well."""
    careless: Imitation = field(
        default_factory=lambda: Imitation(
            steps=300,
            demonstrations=DemonstrationConfig(mistakes=0.38, learn_mistakes=True),
            optimizer=OptimizerConfig(name="muon", learning_rate=3e-4, warmup_steps=10, decay="linear"),
        )
    )
    """The whole game, played badly."""


def make_embedded(output: Path, config: RecipeConfig) -> None:
    """Makes the tokenizer and the model and writes both to `output`; equal configurations give equal files."""
    output.mkdir(parents=True, exist_ok=True)
    _log.info("tokenizer")
    make_tokenizer(output, corpus(), vocab_size=config.vocab_size, window=config.context_window)
    renderer = renderer_for(output)
    shape = DecoderConfig(
        family="qwen3",
        vocab_size=-(-renderer.vocab_size // 16) * 16,
        width=config.width,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_width=config.width // config.num_heads,
        ffn_width=config.ffn_width,
        context_window=config.context_window,
        qk_norm=True,
    )
    model = Decoder(shape).initialize(config.seed)
    _log.info("model of %.2f million parameters", model.num_parameters / 1e6)
    seed = config.seed
    whole = (2, 1, 2, 3, 2, 2, 3)
    for name, lesson, levels in (
        ("copying", config.copying, (1, 2, 1)),
        ("clean", config.clean, whole),
        ("careless", config.careless, whole),
    ):
        _log.info("lesson: %s", name)
        imitate(model, renderer, lesson_envs(levels), lesson, seed)
        seed += lesson.steps * lesson.batch_size
        save_model_folder(model, output / name if name != "careless" else output)


def imitate(
    model: Decoder, renderer: TemplateRenderer, envs: Sequence[TextEnv], lesson: Imitation, first_seed: int
) -> None:
    """Trains the model in place on fresh demonstrations, the environments in turn; no task is seen twice."""
    learner = Learner(model, LearnerConfig(loss="reinforce"), lesson.optimizer, total_steps=lesson.steps)
    demonstrations = stream(envs, renderer, first_seed, lesson.demonstrations)
    for step in range(lesson.steps):
        rows = [row.first(model.context_window + 1) for row in islice(demonstrations, lesson.batch_size)]
        stats = learner.update(imitation_batch(rows), version=step)
        if (step + 1) % 50 == 0:
            _log.info("step %d  loss %.4f", step + 1, stats.loss)
    learner.close()


def lesson_envs(levels: Sequence[int]) -> list[TextEnv]:
    """Returns the environments of a lesson, in turn: the text game at these levels."""
    return [make_env("TextGame-v0", {"level": level}) for level in levels]


def make_tokenizer(output: Path, texts: Iterable[str], *, vocab_size: int, window: int) -> None:
    """Trains a byte-level BPE tokenizer on texts and writes it with the chat template of the embedded models.

    `window` is the most tokens that the model takes.
    """
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in ADDED])
    tokenizer.save(str(output / "tokenizer.json"))
    template = files("agentgym.chat_templates").joinpath("embedded.jinja").read_text()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": window,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {"eos_token_id": tokenizer.token_to_id("<|im_end|>"), "do_sample": True, "temperature": 1.0}
    (output / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def corpus(episodes: int = 400) -> Iterator[str]:
    """Yields the text of every bundled environment at every level, as the model will see it, without the marks."""
    for name, levels in (("TextGame-v0", 5), ("GuessNumber-v0", 3), ("WordLadder-v0", 3)):
        for level in range(1, levels + 1):
            for text in _episode_texts(make_env(name, {"level": level}), episodes):
                yield from without_marks(text)
    yield from ("system\n", "user\n", "assistant\n", "tool\n", *TEMPLATE_TEXT) * 100


def without_marks(text: str) -> list[str]:
    """Returns the text between the tokens that are marks of the chat format."""
    return [part for part in re.split("|".join(map(re.escape, (*SPECIAL, *ADDED))), text) if part]


def _episode_texts(env: TextEnv, episodes: int) -> Iterator[str]:
    yield from [env.system_prompt] * 20
    for seed in range(episodes):
        for kind in ("oracle", "random"):
            observation, _ = env.reset(seed=seed)
            policy = policy_for(env, kind)
            policy.reset(env, observation, seed)
            over = False
            while not over:
                yield observation + "\n"
                action = Action.from_message(policy.act(observation))
                yield "\n" + str(action).partition("\n")[2]
                observation, _, terminated, truncated, _ = env.step(action)
                over = terminated or truncated


def run_recipe(make: Callable[[Path, Any], None], kind: type[Any], arguments: Sequence[str] | None = None) -> None:
    """Runs a recipe, whose settings are of a `kind`, by the command line, which names the folder `output` too."""
    import tyro

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with_folder = make_dataclass("Recipe", [("output", Path)], bases=(kind,), frozen=True, kw_only=True)
    recipe: Any = tyro.cli(with_folder, args=arguments)
    make(recipe.output, recipe)


if __name__ == "__main__":
    run_recipe(make_embedded, RecipeConfig)
