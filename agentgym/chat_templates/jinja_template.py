"""A model's own Jinja chat template, compiled and run as transformers does, without importing transformers."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from agentgym.chat_templates.template_date import parse_date, present_date
from agentgym.errors import RenderError
from agentgym.types import JSON, MalformedCall, Message, ToolCall, ToolSpec

__all__ = ["ChatTemplate", "clean_json", "message_dict", "tool_dict"]

Clean = Callable[[str], str]


class ChatTemplate:
    """Renders conversations to text; `variables` are what the template sees besides messages and tools.

    The variable `strftime_now` is an ISO date: the moment that the template's function of this name formats. The
    default is the moment at which the template was compiled, so that a conversation over midnight has one date.
    """

    def __init__(self, source: str, variables: Mapping[str, JSON]) -> None:
        self.source = source
        moment = parse_date(str(variables.get("strftime_now", present_date())))
        self._variables = {**variables, "strftime_now": moment.strftime}
        try:
            self._template = _compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise RenderError(f"the chat template does not compile (line {error.lineno}): {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, JSON]],
        tools: Sequence[Mapping[str, JSON]] = (),
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Returns the conversation's text; raises RenderError with the template's own message if it refuses."""
        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except (
            jinja2.exceptions.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            if len(messages) > 8:
                roles = f"{len(messages)} messages, the last: {messages[-1]['role']}"
            line = _line_of(error)
            raise RenderError(f"the chat template refuses a conversation of roles ({roles}): {error}{line}") from error


def message_dict(message: Message, clean: Clean, *, text_arguments: bool = False) -> dict[str, JSON]:
    """Returns the message as chat templates take it, every text passed through `clean`.

    A malformed call has no place in a template's `tool_calls`: its raw text is added to the content. `text_arguments`
    gives arguments as JSON text, as in the OpenAI API; some templates take nothing else.
    """

    def arguments_of(call: ToolCall) -> JSON:
        arguments = clean_json(call.arguments, clean)
        return _to_json(arguments) if text_arguments else arguments

    raws = [call.raw for call in message.tool_calls if isinstance(call, MalformedCall)]
    content = "\n".join(filter(None, [message.content, *raws]))
    result: dict[str, JSON] = {"role": message.role, "content": clean(content)}
    if message.reasoning is not None:
        result["reasoning_content"] = result["thinking"] = clean(message.reasoning)  # both names, as transformers does
    calls: list[JSON] = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": clean(call.name), "arguments": arguments_of(call)},
        }
        for call in message.tool_calls
        if not isinstance(call, MalformedCall)
    ]
    if calls:
        result["tool_calls"] = calls
    if message.tool_call_id is not None:
        result["tool_call_id"] = clean(message.tool_call_id)
    if message.name is not None:
        result["name"] = clean(message.name)
    return result


def tool_dict(tool: ToolSpec, clean: Clean) -> Mapping[str, JSON]:
    """Returns the tool in the form that chat templates take, every text passed through `clean`."""
    cleaned = clean_json(tool.to_openai(), clean)
    assert isinstance(cleaned, Mapping)
    return cleaned


def clean_json(value: JSON, clean: Clean) -> JSON:
    """Returns a copy of a JSON value with every string and key passed through `clean`."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(key): clean_json(item, clean) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [clean_json(item, clean) for item in value]
    return value


@functools.lru_cache(maxsize=64)
def _compile_template(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _line_of(error: Exception) -> str:
    """Returns the template's line at which an error was raised: ` (line 7)`, or an empty string."""
    lines = [entry.lineno for entry in traceback.extract_tb(error.__traceback__) if entry.filename == "<template>"]
    return f" (line {lines[-1]})" if lines else ""


class _GenerationBlock(jinja2.ext.Extension):
    """Reads the inside of `{% generation %}`, with which some templates mark the assistant's text, as plain text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
