"""The calls of a format as a grammar, with which an engine holds a sampled reply to its tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentgym.types import JSON, ToolSpec

__all__ = ["NAME", "TAGGED_OBJECT", "CallGrammar"]

NAME = "{name}"
"""The placeholder for the tool's name in `CallGrammar.begin`."""


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The form of one call, for engines that mask what cannot follow.

    Text is free up to `trigger`; from there a reply goes on with the `begin` of one of the tools, arguments by the
    tool's JSON Schema, and `end`, after which text is free again.
    """

    trigger: str
    begin: str
    """The text before the arguments: begins with `trigger`, and has `NAME` in place of the tool's name."""
    end: str
    arguments: Literal["json_schema", "qwen_xml_parameter"] = "json_schema"
    """XGrammar's name for the notation of the arguments."""

    def structural_tag(self, tools: Sequence[ToolSpec]) -> str:
        """Returns the grammar for these tools as JSON: XGrammar's structural tag, which SGLang and vLLM take."""
        tags: list[JSON] = [
            {
                "type": "tag",
                "begin": self.begin.replace(NAME, tool.name),
                "content": {"type": self.arguments, "json_schema": tool.parameters},
                "end": self.end,
            }
            for tool in tools
        ]
        body: dict[str, JSON] = {
            "type": "triggered_tags",
            "triggers": [self.trigger],
            "tags": tags,
            "at_least_one": False,
            "stop_after_first": False,
        }
        return json.dumps({"type": "structural_tag", "format": body}, ensure_ascii=False)


TAGGED_OBJECT = CallGrammar("<tool_call>", f'<tool_call>\n{{"name": "{NAME}", "arguments": ', "}\n</tool_call>")
"""The form that most families write: `<tool_call>`, a JSON object on a line of its own, `</tool_call>`."""
