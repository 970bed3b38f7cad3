"""Plays one episode, from reset to its record: render, sample, parse, act, extend."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Completion, Engine, FinishReason, Sampling
from agentgym.errors import ConfigError, EngineError, EnvironmentFault, RenderError, describe_error
from agentgym.rollout.episode.episode import Episode, EpisodeBuilder, EpisodeEnd
from agentgym.rollout.episode.episode_loop import EpisodeLoop, under_system_prompt
from agentgym.rollout.episode.history import ASK, CompactionConfig, History, compact_messages
from agentgym.rollout.episode.known_prompts import KnownPrompts
from agentgym.rollout.episode.long_text import run_if_short, text_size
from agentgym.rollout.hosting.answer import EnvStep
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.rollout.limits import Limits, SamplingConfig
from agentgym.routed_experts import RoutedExperts
from agentgym.trajectory import Status, StopReason
from agentgym.types import Message, ToolSpec

__all__ = ["NextPrompt", "RolloutLoop", "SamplingPlace", "parse_completion"]

logger = logging.getLogger(__name__)

MAX_EMPTY_RESUMPTIONS = 100
NOTHING = Completion((), (), (), "abort")


@dataclass(frozen=True, slots=True)
class SamplingPlace:
    """The place of a reply in its episode, which gives its seeds and the engine's session."""

    episode: Episode
    session: str
    turn: int
    branch: str = ""

    def seed(self, part: int = 0) -> int:
        """Returns the seed of the reply, or of its resumption number `part`."""
        return self.episode.seed(self.turn, part, self.branch)


@dataclass(frozen=True, slots=True)
class NextPrompt:
    """The ids before the next reply: those that continue the row, or the prompt of a new row."""

    ids: list[int]
    begins_row: bool


class RolloutLoop(EpisodeLoop):
    """Plays episodes and records every sampled id once, under the prompt that it was sampled on.

    A trajectory has one row as long as its prompts continue one another. `history` decides which conversation the model
    is shown (see `History`). An environment may replace it (`info["history"]`), and `compaction` lets the model
    summarize a conversation that fills its window. Each of these begins a row at a real rewrite.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        limits: Limits | None = None,
        sampling: SamplingConfig | None = None,
        *,
        history: History = "append",
        compaction: CompactionConfig | None = None,
    ) -> None:
        if history not in ("append", "rerender"):
            raise ConfigError(f'history is "append" or "rerender", got {history!r}')
        if renderer.vocab_size > engine.vocab_size:
            raise ConfigError(
                f"the tokenizer has {renderer.vocab_size} ids and the engine's model only {engine.vocab_size}: "
                "use the tokenizer that belongs to the model"
            )
        super().__init__(limits or Limits())
        self.engine = engine
        self.renderer = renderer
        self._known_prompts = KnownPrompts()
        self.end_thinking = renderer.thinking[1]
        self.sampling = sampling or SamplingConfig()
        self.history = history
        self.compaction = compaction or CompactionConfig()
        self.window = min(self.limits.context_window or engine.context_window, engine.context_window)
        self.turn_tokens = self.limits.turn_tokens_in(self.window)

    async def _converse(self, env: HostedEnv, builder: EpisodeBuilder) -> EpisodeEnd:
        """Plays the conversation itself, to its regular end."""
        messages, tools = await self._open(env, builder)
        opening = tuple(messages)
        while True:
            finish_reason, message, cut = await self._reply(builder, tools)
            if finish_reason == "length" and not self._may_answer(cut):
                builder.end_turn(None)
                return EpisodeEnd(Status.TRUNCATED, cut)
            answer = await self._act(env, builder, message)
            ending = self._ending(answer, len(builder.turns) - builder.num_summaries)
            if ending is not None:
                return ending
            messages.append(message)
            if await self._is_long(builder, answer, messages, tools):
                answer = await self._summarize(builder, opening, messages, answer, tools)
            messages = self._conversation_after(env, messages, answer)
            exceeded = await self._extend(builder, answer, messages, tools)
            if exceeded is not None:
                return EpisodeEnd(Status.TRUNCATED, exceeded)

    async def _open(self, env: HostedEnv, builder: EpisodeBuilder) -> tuple[list[Message], tuple[ToolSpec, ...]]:
        """Resets the environment and begins the first row; returns the messages and tools that it was rendered from."""
        messages, tools = await self._reset(env, builder)
        builder.begin_row(await self._first_prompt(messages, tools), messages, tools)
        return messages, tools

    async def _first_prompt(self, messages: Sequence[Message], tools: tuple[ToolSpec, ...]) -> list[int]:
        """Returns the ids of an episode's first prompt; raises EnvironmentFault if it leaves no room for a reply."""
        prompt_ids = self._known_prompts.find(messages, tools)
        if prompt_ids is None:
            prompt_ids = await self._render_prompt(messages, tools)
            self._known_prompts.keep(messages, tools, prompt_ids)
        self._check_prompt(prompt_ids)
        return prompt_ids

    async def _render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return await run_if_short(text_size(messages, tools), self.renderer.render, messages, tools)

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raises EnvironmentFault if the first prompt leaves no room for a reply."""
        left, reason = self._budget(len(prompt_ids), len(prompt_ids))
        if left < 1:
            limit = self.window if reason is StopReason.CONTEXT else self.limits.trajectory_tokens
            raise EnvironmentFault(
                f"the first prompt has {len(prompt_ids)} ids, which leaves none of the {limit} ({reason}) for a reply: "
                "shorten the system prompt, the tools or the observation, or raise the limit"
            )

    def _budget(self, row_tokens: int, all_tokens: int) -> tuple[int, StopReason]:
        """Returns how many ids a reply may have in a row and trajectory so long, and the reason for using them all."""
        limits = self.limits
        left, reason = self.turn_tokens, StopReason.TURN_TOKENS
        if limits.trajectory_tokens is not None and limits.trajectory_tokens - all_tokens < left:
            left, reason = limits.trajectory_tokens - all_tokens, StopReason.TRAJECTORY_TOKENS
        if self.window - row_tokens < left:
            left, reason = self.window - row_tokens, StopReason.CONTEXT
        return left, reason

    async def _reply(
        self, builder: EpisodeBuilder, tools: tuple[ToolSpec, ...]
    ) -> tuple[FinishReason, Message, StopReason]:
        """Samples, parses and records one reply; the last item is the budget that cut it, if it was cut."""
        started = time.perf_counter()
        max_tokens, cut = self._budget(len(builder.ids), builder.num_tokens)
        grammar = self._grammar(tools)
        completion = await self._sample(builder.ids, max_tokens, _place(builder), grammar)
        message = await parse_completion(self.renderer, completion, tools, builder.ids)
        excluded = "constrained" if grammar else ""
        builder.add_reply(completion, message, time.perf_counter() - started, excluded=excluded)
        return completion.finish_reason, message, cut

    def _grammar(self, tools: tuple[ToolSpec, ...]) -> str:
        """Returns the grammar of the next reply (`Sampling.grammar`); with one, the reply is in no loss."""
        return ""

    async def _sample(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        place: SamplingPlace,
        grammar: str = "",
        stop: tuple[str, ...] = (),
    ) -> Completion:
        """Samples one whole reply; if the engine aborts it (for a weight update), continues from its exact ids.

        `stop` are stop strings of this reply, besides those of the settings.
        """
        sampling = self._sampling(max_tokens, place.seed(), grammar)
        sampling = replace(sampling, stop=(*sampling.stop, *stop)) if stop else sampling
        whole = await self._generate(place.session, prompt_ids, sampling)
        part = num_empty = 0
        while whole.finish_reason == "abort":
            if grammar:  # a grammar begins with the reply, and not in its middle
                whole = NOTHING
            left = max_tokens - len(whole.ids)
            if left == 0:
                return replace(whole, finish_reason="length")
            part += 1
            sampling = replace(sampling, max_tokens=left, seed=place.seed(part))
            rest = await self._generate(place.session, [*prompt_ids, *whole.ids], sampling)
            num_empty = 0 if rest.ids and not grammar else num_empty + 1
            if num_empty > MAX_EMPTY_RESUMPTIONS:
                raise EngineError(f"the engine gave up the same reply {num_empty} times without a new id")
            whole = await end_at_stop(join_completions(whole, rest), sampling)
        if not whole.ids:
            raise EngineError("the engine returned a reply without a single id")
        return whole

    async def _generate(self, session: str, prompt_ids: list[int], sampling: Sampling) -> Completion:
        completion = await self.engine.generate(prompt_ids, sampling, session=session)
        await self.fair_gate.wait_turn()
        check_completion(completion, sampling, self.engine.vocab_size)
        if completion.finish_reason == "abort" and completion.ids and completion.ids[-1] in sampling.stop_ids:
            return replace(completion, finish_reason="stop")  # it was aborted just after it had ended
        return await end_at_stop(completion, sampling)

    def _sampling(self, max_tokens: int, seed: int, grammar: str) -> Sampling:
        return self.sampling.for_reply(max_tokens, seed=seed, renderer=self.renderer, grammar=grammar)

    def _conversation_after(self, env: HostedEnv, messages: Sequence[Message], answer: EnvStep) -> list[Message]:
        """Returns the conversation after an answer: all messages so far, or the environment's replacement."""
        if answer.history is not None:
            return under_system_prompt(env, answer.history)
        return [*messages, *answer.messages]

    async def _extend(
        self, builder: EpisodeBuilder, answer: EnvStep, messages: Sequence[Message], tools: tuple[ToolSpec, ...]
    ) -> StopReason | None:
        """Appends the whole answer, or returns the budget that would leave no room for a reply after it."""
        next_prompt = await self._render_next(builder.ids, answer, messages, tools)
        row_tokens = len(next_prompt.ids) + (0 if next_prompt.begins_row else len(builder.ids))
        left, reason = self._budget(row_tokens, builder.num_tokens + len(next_prompt.ids))
        if left < 1:
            return reason
        if next_prompt.begins_row:
            builder.begin_row(next_prompt.ids, messages, tools)
        else:
            builder.add_answer(next_prompt.ids)
        return None

    async def _render_next(
        self, ids: Sequence[int], answer: EnvStep, messages: Sequence[Message], tools: tuple[ToolSpec, ...]
    ) -> NextPrompt:
        """Returns what `_next_prompt` does; a long text is rendered in a thread."""
        if self.history == "append" and answer.history is None:
            size = text_size(answer.messages)
        else:
            size = text_size(messages, tools) + len(ids)
        return await run_if_short(size, self._next_prompt, ids, answer, messages, tools)

    def _next_prompt(
        self, ids: Sequence[int], answer: EnvStep, messages: Sequence[Message], tools: tuple[ToolSpec, ...]
    ) -> NextPrompt:
        """Returns the ids before the next reply to `messages`, which end with `answer`; `ids` end with a reply."""
        if self.history == "append" and answer.history is None:
            return NextPrompt(self._answer_ids(ids, answer), begins_row=False)
        whole = self.renderer.rerender(messages, tools)
        try:
            new = self.renderer.extend(ids, answer.messages)
        except RenderError:  # the template rewrites what came before: only its whole text is right
            return NextPrompt(whole, begins_row=True)
        is_same = self.renderer.decode(whole) == self.renderer.decode([*ids, *new])
        return NextPrompt(new, begins_row=False) if is_same else NextPrompt(whole, begins_row=True)

    def _answer_ids(self, ids: Sequence[int], answer: EnvStep) -> list[int]:
        """Returns the ids of an answer after the sampled ones; raises RenderError if the template has none."""
        try:
            return self.renderer.extend(ids, answer.messages)
        except RenderError as error:
            how = 'with the history "rerender" the template renders the whole conversation at every turn'
            raise RenderError(f"{error}; {how}") from error

    async def _is_long(
        self, builder: EpisodeBuilder, answer: EnvStep, messages: Sequence[Message], tools: tuple[ToolSpec, ...]
    ) -> bool:
        """Returns whether the next prompt exceeds the limit of compaction; False if the environment replaces it."""
        if self.compaction.at is None or answer.history is not None:
            return False
        next_prompt = await self._render_next(builder.ids, answer, [*messages, *answer.messages], tools)
        row_tokens = len(next_prompt.ids) + (0 if next_prompt.begins_row else len(builder.ids))
        return row_tokens > self.compaction.at * self.window

    async def _summarize(
        self,
        builder: EpisodeBuilder,
        opening: Sequence[Message],
        messages: Sequence[Message],
        answer: EnvStep,
        tools: tuple[ToolSpec, ...],
    ) -> EnvStep:
        """Returns the answer after a summary by the model, or the answer unchanged if no summary fits."""
        ask = EnvStep(ASK, (Message("user", ASK),))
        conversation = [*messages, *ask.messages]
        if await self._extend(builder, ask, conversation, tools) is not None:
            return answer
        max_tokens, _ = self._budget(len(builder.ids), builder.num_tokens)
        completion = await self._sample(builder.ids, min(max_tokens, self.compaction.tokens), _place(builder))
        message = await parse_completion(self.renderer, completion, tools, builder.ids)
        builder.add_summary(completion, message, ASK, excluded="" if self.compaction.train else "summary")
        return replace(answer, history=compact_messages(opening, message.content, messages[-1], answer.messages))

    async def _end_session(self, session: str) -> None:
        try:
            async with asyncio.timeout(self.limits.close_s):
                await self.engine.abort(session)
        except (EngineError, TimeoutError) as error:
            logger.warning("the engine did not release session %s: %s", session, describe_error(error))

    async def close(self) -> None:
        """Closes the engine."""
        await self.engine.close()


def _place(builder: EpisodeBuilder) -> SamplingPlace:
    """Returns the place of the builder's next reply."""
    return SamplingPlace(builder.episode, builder.episode.session, len(builder.turns))


def check_completion(completion: Completion, sampling: Sampling, vocab_size: int) -> None:
    """Raises EngineError for an invalid completion, before it becomes part of a record."""
    ids = completion.ids
    if len(ids) > sampling.max_tokens:
        raise EngineError(f"the engine returned {len(ids)} ids where max_tokens was {sampling.max_tokens}")
    if not frozenset(sampling.stop_ids).isdisjoint(ids[:-1]):
        raise EngineError("the engine went on sampling after a stop id: a reply ends with its first one")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise EngineError(f"the engine returned the id {max(ids)}, outside of its vocabulary of {vocab_size}")
    logprobs = completion.logprobs
    if logprobs and not (-1e9 < min(logprobs) and max(logprobs) <= 1e-6 and math.isfinite(sum(logprobs))):
        raise EngineError("the engine returned a logprob that is not finite or above 0")


async def parse_completion(
    renderer: Renderer, completion: Completion, tools: Sequence[ToolSpec], prompt: Sequence[int]
) -> Message:
    """Returns a reply to `prompt` as a message, without the text after a stop string that ended it."""
    ids, ends = completion.ids, {"stop": completion.stop} if completion.stop else {}
    return await run_if_short(len(ids), renderer.parse, ids, tools, prompt, **ends)


async def end_at_stop(completion: Completion, sampling: Sampling) -> Completion:
    """Returns a reply up to the id that completes its first stop string, or the whole reply if it has none."""
    ids = completion.ids
    match = await run_if_short(len(ids), sampling.find_stop, ids) if sampling.stop else None
    if match is None:
        return completion
    num_ids, stop = match
    experts, num_cut = completion.experts, len(ids) - num_ids
    if experts is not None and num_cut:
        experts = RoutedExperts.of(experts.experts_TRK[:-num_cut], experts.start)
    sampled = ids[:num_ids], completion.logprobs[:num_ids], completion.policy_versions[:num_ids]
    return Completion(*sampled, "stop", experts, stop)


def join_completions(first: Completion, rest: Completion) -> Completion:
    """Returns a reply and its continuation as one."""
    return Completion(
        first.ids + rest.ids,
        first.logprobs + rest.logprobs,
        first.policy_versions + rest.policy_versions,
        rest.finish_reason,
        first.experts if rest.experts is None else rest.experts.after(first.experts),
    )
