"""OpenAI's custom tools, which take any text: for the policy they are tools with the one argument `input`."""

from __future__ import annotations

from collections.abc import Mapping

from agentgym.openai_wire import WireError
from agentgym.rollout.serving.wires.wire import SentCall, ToolNames
from agentgym.types import JSON, ToolSpec

__all__ = ["custom_input", "custom_tool"]

INPUT: Mapping[str, JSON] = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def custom_tool(tool: object, where: str, names: ToolNames, namespace: str = "") -> ToolSpec:
    """Returns the tool that the policy sees; a grammar of its input goes into the description. Raises WireError."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        raise WireError(f"{where} is a custom tool with a name, got {str(tool)[:80]}", where)
    rule = tool.get("format")
    grammar = rule.get("grammar", rule) if isinstance(rule, Mapping) else None  # chat completions put it lower
    text = str(tool.get("description") or "")
    if isinstance(grammar, Mapping) and isinstance(grammar.get("definition"), str):
        text += f"\nThe input follows this grammar ({grammar.get('syntax')}):\n{grammar['definition']}"
    return ToolSpec(names.add(tool["name"], namespace, "custom"), text.strip(), INPUT)


def custom_input(call: SentCall) -> str:
    """Returns the input of a call, or all that was written in its place."""
    text = call.value.get("input") if call.value is not None else None
    return text if isinstance(text, str) else call.arguments
