"""Which of an episode's conversations is the agent's main one, and which it leads beside its task."""

from __future__ import annotations

from collections import Counter

from agentgym.rollout.serving.branch_label import MIN_TASK, SIDE_LABELS, shape_label, texts_of_calls
from agentgym.rollout.serving.reply_tree import Context, ReplyTree, SampledReply

__all__ = ["BranchRoots"]


class BranchRoots:
    """The contexts of a tree that continue none, at the moment: labels follow from headers and from their shape."""

    def __init__(self, tree: ReplyTree) -> None:
        self.call_texts = texts_of_calls([reply.message for reply in tree.replies])
        self._sizes = Counter(reply.context.root for reply in tree.replies)
        self._summaries = [(reply.number, line) for reply in tree.replies if (line := self._summary(reply))]
        roots = [root for root in tree.contexts if root.replies and root.before is None]
        self.main = max(roots, key=self._rank, default=None)
        """The environment's opening if the agent went on with it, else the largest that is not beside the task."""
        tasks = [root for root in roots if not self.side_label(root)]
        shorter = [root for root in tasks if self.goes_on_from_summary(root)]
        self._parts = [*(root for root in tasks[:1] if shorter and root.tools == shorter[0].tools), *shorter]
        """The parts of a conversation that was summarized: its begin, and what goes on from each summary."""

    def label(self, root: Context) -> str:
        """Returns the label of the rows that begin with a root."""
        is_main = (root.root is self.main and root.label not in SIDE_LABELS) or root in self._parts
        return "main" if is_main else self.side_label(root) or root.label or "side"

    def side_label(self, root: Context) -> str:
        """Returns the label of a root that is beside the task; empty if nothing shows that it is."""
        if root.label in SIDE_LABELS:
            return root.label
        if root.is_env or (root.before is not None and root.tools) or self.goes_on_from_summary(root):
            return ""
        is_single = self._sizes[root] == 1 and not root.replies[0].message.tool_calls
        return shape_label(root.messages, self.call_texts, is_single=is_single, has_tools=bool(root.tools))

    def goes_on_from_summary(self, root: Context) -> bool:
        """Returns whether a root holds a summary that was sampled before it: it is the conversation, shortened."""
        if root.label in SIDE_LABELS or not root.tools:
            return False
        first = min((reply.number for reply in root.replies), default=0)
        lines = [line for number, line in self._summaries if number < first]
        return any(line in message.content for line in lines for message in root.messages)

    def _summary(self, reply: SampledReply) -> str:
        """Returns the longest line of a summary; empty for a reply that is none. A harness may leave its marks out."""
        root = reply.context
        if reply.message.tool_calls or not (root.label == "summary" or (root.parent is None and not root.tools)):
            return ""
        label = root.label or shape_label(root.messages, (), is_single=True, has_tools=False)
        line = max(reply.message.content.splitlines(), key=len, default="").strip()
        return line if label == "summary" and len(line) >= MIN_TASK else ""

    def _rank(self, root: Context) -> tuple[bool, bool, int, bool, int, str]:
        is_task = not self.side_label(root)
        return root.is_env, is_task, self._sizes[root], bool(root.tools), len(root.ids), root.key
