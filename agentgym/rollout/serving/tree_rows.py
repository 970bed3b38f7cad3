"""The rows and turns of a tree of replies, in an order that does not depend on when requests arrived."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from agentgym.rollout.episode.episode import answered_turn, policy_span
from agentgym.rollout.hosting.answer import EnvStep
from agentgym.rollout.serving.branch_label import SIDE_LABELS, shape_label
from agentgym.rollout.serving.branch_roots import BranchRoots
from agentgym.rollout.serving.reply_tree import Context, ReplyTree, SampledReply, texts_without_ids
from agentgym.trajectory import BRANCH_LABELS, Row, RowOrigin, Source, TokenSpan, Turn
from agentgym.types import Message

__all__ = ["rows_of"]


class _Start(NamedTuple):
    """A row to be written: the sample that it begins with (None for a prompt alone), and how it begins."""

    context: Context
    reply: SampledReply | None
    kind: Literal["root", "continued", "fork"]
    """`root` has a render of its own, `continued` too, after a row of the same branch; `fork` has another row's ids."""
    label: str = "main"
    """The label of a row without an origin: that of the branch that it continues."""


def rows_of(
    tree: ReplyTree, *, has_reward: bool, credit: Collection[str] = BRANCH_LABELS
) -> tuple[list[Row], list[Turn]]:
    """Returns the rows of all branches, and their turns sorted by row.

    Each reply is in the loss of one row: that of the branch it was sampled in. What forks from it has its ids as
    prompt. A sample that nothing follows, while another one of its context is followed, is excluded, and so are the
    replies of branches whose label is not in `credit`. Without a reward, what nothing answered has none.
    """
    return _Writer(tree, has_reward, credit).write()


class _Writer:
    def __init__(self, tree: ReplyTree, has_reward: bool, credit: Collection[str]) -> None:
        self.tree, self.has_reward, self.credit = tree, has_reward, credit
        self.rows: list[Row] = []
        self.turns: list[Turn] = []
        self.places: dict[SampledReply, tuple[int, int]] = {}
        """The row and the turn of each reply."""
        self.sizes: Counter[SampledReply | Context] = Counter()
        """The number of replies from each reply, or each context, on."""
        for reply in tree.replies:
            _settle_tool_answers(reply)
        for reply in reversed(tree.replies):
            self.sizes[reply] += 1
            self.sizes[reply.context] += self.sizes[reply]
            if reply.context.parent is not None:
                self.sizes[reply.context.parent] += self.sizes[reply]
        self.roots = BranchRoots(tree)

    def write(self) -> tuple[list[Row], list[Turn]]:
        if self.tree.calls and not self.tree.replies:
            return [], self.tree.calls
        stack = [start for root in self._sorted_roots() for start in self._starts(root, "root")]
        stack = stack[::-1] or [_Start(root, None, "root") for root in self.tree.contexts[:1]]
        while stack:
            stack += reversed(self._write_row(stack.pop()))
        orders = [turn.order or 0 for turn in self.turns]
        if orders == sorted(orders):
            self.turns = [replace(turn, order=None) for turn in self.turns]
        return self.rows, self.turns

    def _sorted_roots(self) -> list[Context]:
        """Returns the roots that have replies: the main one, then the others by length."""
        roots = [root for root in self.tree.contexts if root.replies]
        return sorted(roots, key=lambda root: (root is not self.roots.main, *_length(root)))

    def _samples(self, context: Context) -> list[SampledReply]:
        """Returns the samples of a context, the one with most replies after it first."""
        return sorted(context.replies, key=lambda reply: (-self.sizes[reply], reply.branch))

    def _starts(self, context: Context, kind: Literal["root", "continued", "fork"]) -> list[_Start]:
        """Returns the rows that begin with a context; all samples but the first fork."""
        samples = self._samples(context)
        return [_Start(context, sample, "fork" if index else kind) for index, sample in enumerate(samples)]

    def _write_row(self, start: _Start) -> list[_Start]:
        """Writes a row; returns those that begin in it."""
        spans = [TokenSpan(tuple(start.context.prompt()), Source.PROMPT)]
        origin = self._origin(start)
        label = start.label if origin is None else origin.label
        no_credit = "" if label in self.credit else label
        starts: list[_Start] = []
        forks: list[_Start] = []
        reply = start.reply
        while reply is not None:
            spans.append(policy_span(reply.completion, spans, reply.exclusion or no_credit))
            self.places[reply] = (len(self.rows), len(self.turns))
            following = self._continuation(reply, label)
            self.turns.append(self._turn(reply, following))
            if reply is not start.reply:
                forks += self._starts(reply.context, "fork")[1:]
            for context in sorted(reply.contexts, key=lambda context: context.key):
                forks += self._starts(context, "fork") if context is not following else []
            reply = None
            if following is not None and following.begins_row:
                starts = [each._replace(label=label) for each in self._starts(following, "continued")]
            elif following is not None:
                spans += [TokenSpan(following.ids, Source.ENV)] if following.ids else []
                reply = next(iter(self._samples(following)), None)
        self.rows.append(Row(tuple(spans), start.context.messages, start.context.tools, origin))
        return [*starts, *forks]

    def _origin(self, start: _Start) -> RowOrigin | None:
        context, parent = start.context, start.context.parent
        if start.kind == "continued" or (start.kind == "root" and context.is_env):
            return None
        if start.kind == "root":
            return RowOrigin(self.roots.label(context), client=context.client)
        label = "" if context.label == "main" else context.label
        is_shorter = not label and self.roots.goes_on_from_summary(context)
        label = label or ("main" if is_shorter else self._shape_label(start, context.answer.messages)) or "fork"
        origin = RowOrigin(label, client=context.client)
        if parent is None:
            return replace(origin, row=self.places[self._samples(context)[0]][0], num_shared=len(context.messages))
        if context.begins_row:
            return origin
        row, turn = self.places[parent]
        num_shared = len(context.messages) - len(context.answer.messages)
        return replace(origin, row=row, turn=turn, num_shared=num_shared)

    def _shape_label(self, start: _Start, new: Sequence[Message]) -> str:
        reply = start.reply
        is_single = reply is not None and self.sizes[reply] == 1 and not reply.message.tool_calls
        return shape_label(new, self.roots.call_texts, is_single=is_single, has_tools=bool(start.context.tools))

    def _continuation(self, reply: SampledReply, label: str) -> Context | None:
        """Returns the context that continues the reply's branch: the environment's, else the one with most replies.

        What a header calls a sub-agent, a summary or a title continues no branch of another kind.
        """
        by_env = next((context for context in reply.contexts if context.is_env), None)
        if by_env is not None or reply.answer is not None:
            return by_env
        contexts = [context for context in reply.contexts if context.replies]
        contexts = [context for context in contexts if context.label not in SIDE_LABELS or context.label == label]
        return min(contexts, key=lambda context: (-self.sizes[context], context.key), default=None)

    def _turn(self, reply: SampledReply, following: Context | None) -> Turn:
        turn = replace(reply.turn, order=reply.number)
        if reply.answer is not None:
            turn = answered_turn(turn, reply.answer, turn.timings.get("env_s", 0.0))
        elif following is not None:
            turn = answered_turn(turn, following.answer)
        elif self.has_reward or reply.is_followed:
            turn = answered_turn(turn, _tool_answer(reply))
        if turn.reward is None:
            return turn
        earned = [answer.reward for answer in reply.tool_answers.values()]
        early = [call.reward or 0.0 for call in self.tree.calls if reply is self.tree.replies[-1]]
        return replace(turn, reward=math.fsum([turn.reward, reply.loose_reward, *earned, *early]))


def _settle_tool_answers(reply: SampledReply) -> None:
    """Gives the answers to a reply's calls over MCP to the sample of its context that the agent went on with.

    They came when that was not known yet. A reply that keeps one is followed.
    """
    used = [sample for sample in reply.context.replies if sample.contexts and not reply.contexts]
    texts = texts_without_ids(reply.message)
    for position, sample in [(position, sample) for position in sorted(reply.tool_answers) for sample in used]:
        same = (number for number, text in enumerate(texts_without_ids(sample.message)) if text == texts[position])
        place = next((number for number in same if number not in sample.tool_answers), None)
        if place is not None and position in reply.tool_answers:
            sample.tool_answers[place] = reply.tool_answers.pop(position)
            sample.follow(sample.asked_at)
    if reply.tool_answers:
        reply.follow(reply.asked_at)


def _tool_answer(reply: SampledReply) -> EnvStep:
    """Returns the answers to calls over MCP as one, for a reply whose results the agent has not sent back."""
    answers = [answer for _, answer in sorted(reply.tool_answers.items(), key=lambda item: item[0])]
    results = tuple(result for answer in answers for result in answer.tool_results)
    messages = tuple(message for answer in answers for message in answer.messages)
    return EnvStep("\n".join(answer.observation for answer in answers), messages, tool_results=results)


def _length(context: Context) -> tuple[int, int, str]:
    num_replies = sum(message.role == "assistant" for message in context.messages)
    return num_replies, len(context.messages), context.key
