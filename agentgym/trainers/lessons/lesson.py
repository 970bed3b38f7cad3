"""The material of a lesson: its batches, by step, and the rows or pairs that measure it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar, cast

import numpy as np

from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.envs.catalog.resolve import make_env
from agentgym.errors import ConfigError
from agentgym.model.language_model import LanguageModel
from agentgym.rollout.seeds import derive
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.lessons.batches import check_vocabulary, imitation_batch, pair_batch
from agentgym.trainers.lessons.config import DpoConfig, LessonConfig, SftConfig
from agentgym.trainers.lessons.demonstrations import Demonstration, Pair, stream
from agentgym.trainers.lessons.pairs import pairs_of_episodes, pairs_of_files
from agentgym.trainers.lessons.player_trial import MAX_TRIED, try_player
from agentgym.trainers.lessons.sft_rows import ConversationSource, EpisodeSource, SftRows
from agentgym.trainers.lessons.tokenizer_fit import describe_words
from agentgym.types import JSON, Message, Task

__all__ = ["Lesson", "open_lesson", "passes"]

T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class Lesson(Generic[T]):
    """The demonstrations, rows or pairs of a run, and how they become batches."""

    items_after: Callable[[int], Iterator[T]]
    """Returns those after the first so many."""
    to_batch: Callable[[Sequence[T]], TrainingBatch]
    summarize: Callable[[Sequence[T]], Mapping[str, float]]
    """Returns the numbers of a step's items, as its line of metrics.jsonl has them."""
    batch_size: int
    noun: str = "demonstrations"
    num_items: int = 0
    """The number of rows or pairs of a pass; 0 for demonstrations, which are always new."""
    validation: TrainingBatch | None = None
    """Rows or pairs that are not learned, whose loss is measured after every pass and after the last step."""
    task: Task | None = None
    """A task to try the model on, if what is learned has any."""
    report: tuple[str, ...] = ()
    """Lines that say what is learned and what was left out."""
    close: Callable[[], None] = lambda: None
    _items: Iterator[T] | None = None

    def take(self, step: int) -> Sequence[T]:
        """Returns the items of a step; the steps are taken in their order, from any one on."""
        if self._items is None:
            self._items = self.items_after((step - 1) * self.batch_size)
        return list(itertools.islice(self._items, self.batch_size))

    def measures_after(self, step: int, last: int) -> bool:
        """Returns True if `validation` is measured after this step."""
        return self.validation is not None and (step % ceil(self.num_items / self.batch_size) == 0 or step == last)


def open_lesson(
    config: LessonConfig, renderer: Renderer, sizes: LanguageModel, *, is_resumed: bool = False
) -> tuple[Lesson[object], LessonConfig]:
    """Returns what the settings name, and the settings with the steps of their epochs.

    The player of a run that is resumed was tried when it began. `sizes` is the model, with or without weights. Raises
    ConfigError for a tokenizer that is another model's, and for what cannot be learned; RunFolderError for folders
    without episodes.
    """
    if not isinstance(renderer, TemplateRenderer):
        raise ConfigError(
            f"{config.family!r} returns a {type(renderer).__name__}: recorded conversations are learned with an"
            " agentgym.chat_templates.TemplateRenderer or a class that derives from it"
        )
    check_vocabulary(renderer, sizes)
    if isinstance(config, DpoConfig):
        lesson: Lesson[object] = cast("Lesson[object]", _of_pairs(config, renderer, sizes))
    else:
        assert isinstance(config, SftConfig)
        of_env = partial(_of_demonstrations, tries_player=not is_resumed)
        lesson = cast("Lesson[object]", (of_env if config.env else _of_rows)(config, renderer, sizes))
    return lesson, replace(config, steps=config.num_steps(lesson.num_items))


def passes(rows: Sequence[T], seed: int) -> Iterator[T]:
    """Yields the rows endlessly, each pass in another order, which follows from the seed.

    A step at the end of one pass continues with the next.
    """
    for number in itertools.count():
        for index in np.random.default_rng([seed, number]).permutation(len(rows)):
            yield rows[index]


def _of_demonstrations(
    config: SftConfig, renderer: TemplateRenderer, sizes: LanguageModel, *, tries_player: bool
) -> Lesson[Demonstration]:
    kwargs = cast(Mapping[str, JSON], config.env_kwargs)
    # far enough below the held-out tasks
    first_seed = derive(config.seed, "sft") % (EVAL_SEED_START // 2)
    report = try_player(config, renderer, sizes.context_window, first_seed) if tries_player else ()
    env = make_env(config.env, kwargs)

    def items_after(number: int) -> Iterator[Demonstration]:
        demonstrations = stream([env], renderer, first_seed + number, config.demonstrations)
        return (row.first(sizes.context_window + 1) for row in demonstrations)

    return Lesson(
        items_after=items_after,
        to_batch=imitation_batch,
        summarize=_summarize_rows,
        batch_size=config.batch_size,
        task=Task(config.env, 0, kwargs=kwargs),
        report=report,
        close=env.close,
    )


def _of_rows(config: SftConfig, renderer: TemplateRenderer, sizes: LanguageModel) -> Lesson[Demonstration]:
    def read(paths: Sequence[str]) -> Learned[Demonstration]:
        if config.conversations:
            files = ConversationSource(paths=tuple(paths), skip_malformed=config.skip_malformed)
            rows = SftRows.of_conversations(files, renderer, sizes.context_window)
        else:
            runs = tuple(map(Path, paths))
            episodes = EpisodeSource(paths=runs, min_reward=config.min_reward, best_per_task=config.best_per_task)
            rows = SftRows.of_episodes(episodes, renderer, sizes.vocab_size, sizes.context_window)
        replies = _replies(renderer, rows.rows[:MAX_TRIED])
        return rows.rows, (*rows.report, *describe_words(renderer.tokenizer, replies)), rows.task

    return _repeat_items(config, read, imitation_batch, _summarize_rows, "rows")


def _replies(renderer: TemplateRenderer, rows: Sequence[Demonstration]) -> Iterator[Message]:
    """Yields the replies that rows imitate."""
    for row in rows:
        for is_reply, members in itertools.groupby(zip(row.ids, row.mask, strict=True), lambda member: member[1]):
            if is_reply:
                yield renderer.parse([token for token, _ in members])


def _of_pairs(config: DpoConfig, renderer: TemplateRenderer, sizes: LanguageModel) -> Lesson[Pair]:
    def read(paths: Sequence[str]) -> Learned[Pair]:
        if config.pairs:
            pair_set = pairs_of_files(paths, renderer, sizes.context_window)
        else:
            numbers = (sizes.vocab_size, sizes.context_window)
            pair_set = pairs_of_episodes([*map(Path, paths)], renderer, *numbers, per_task=config.pairs_per_task)
        return pair_set.pairs, pair_set.report, pair_set.task

    return _repeat_items(
        config, read, pair_batch, lambda pairs: {"tokens": sum(pair.num_tokens for pair in pairs)}, "pairs"
    )


Learned: TypeAlias = tuple[Sequence[T], tuple[str, ...], Task | None]
"""Rows or pairs, lines that say what was left out, and a task of them."""


def _repeat_items(
    config: LessonConfig,
    read_items: Callable[[Sequence[str]], Learned[T]],
    to_batch: Callable[[Sequence[T]], TrainingBatch],
    summarize: Callable[[Sequence[T]], Mapping[str, float]],
    noun: str,
) -> Lesson[T]:
    """Returns the lesson of rows or pairs that `read_items` returns for files or folders, in passes over them."""
    items, report, task = read_items(config.paths)
    validation = None
    if config.validation:
        measured, lines, _ = read_items(config.validation)
        validation, report = to_batch(measured), (*report, *lines)
    return Lesson(
        items_after=lambda number: itertools.islice(passes(items, config.seed), number, None),
        to_batch=to_batch,
        summarize=summarize,
        batch_size=config.batch_size,
        noun=noun,
        num_items=len(items),
        validation=validation,
        task=task,
        report=report,
    )


def _summarize_rows(rows: Sequence[Demonstration]) -> Mapping[str, float]:
    outcomes = [row.success for row in rows if row.success is not None]
    numbers = {"tokens": sum(len(row.ids) for row in rows), "imitated_tokens": sum(sum(row.mask) for row in rows)}
    return {**numbers, **({"demonstration_success": sum(outcomes) / len(outcomes)} if outcomes else {})}
