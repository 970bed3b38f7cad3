"""Which of an episode's conversations is the agent's main one, and which it leads beside its task."""

from __future__ import annotations

from collections import Counter

from agentgym.rollout.serving.branch_label import SIDE_LABELS, shape_label, texts_of_calls
from agentgym.rollout.serving.reply_tree import Context, ReplyTree

__all__ = ["BranchRoots"]


class BranchRoots:
    """The contexts of a tree that continue none, at the moment: labels follow from headers and from their shape."""

    def __init__(self, tree: ReplyTree) -> None:
        self.call_texts = texts_of_calls([reply.message for reply in tree.replies])
        self._sizes = Counter(reply.context.root for reply in tree.replies)
        roots = [root for root in tree.contexts if root.replies and root.before is None]
        self.main = max(roots, key=self._rank, default=None)
        """The environment's opening if the agent went on with it, else the largest that is not beside the task."""

    def label(self, root: Context) -> str:
        """Returns the label of the rows that begin with a root."""
        side = self.side_label(root)
        is_main = root.root is self.main and root.label not in SIDE_LABELS
        return "main" if is_main else side or root.label or "side"

    def side_label(self, root: Context) -> str:
        """Returns the label of a root that is beside the task; empty if nothing shows that it is."""
        if root.label in SIDE_LABELS:
            return root.label
        if root.is_env or (root.before is not None and root.tools):
            return ""
        is_single = self._sizes[root] == 1 and not root.replies[0].message.tool_calls
        return shape_label(root.messages, self.call_texts, is_single=is_single, has_tools=bool(root.tools))

    def _rank(self, root: Context) -> tuple[bool, bool, int, bool, int, str]:
        is_task = not self.side_label(root)
        return root.is_env, is_task, self._sizes[root], bool(root.tools), len(root.ids), root.key
