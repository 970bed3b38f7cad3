"""The renderer and reply format of a model: recognized by its chat template, or requested by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentgym.chat_templates.custom_renderer import make_custom_renderer
from agentgym.chat_templates.formats.hermes import HERMES
from agentgym.chat_templates.formats.protocol import ReplyFormat
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.recorded_format import recorded_format
from agentgym.chat_templates.renderers.chatml import BielikRenderer, ChatMLRenderer
from agentgym.chat_templates.renderers.command_r import CommandRenderer
from agentgym.chat_templates.renderers.deepseek import DeepSeekRenderer, DeepSeekV32Renderer
from agentgym.chat_templates.renderers.gemma4 import Gemma4Renderer
from agentgym.chat_templates.renderers.harmony import HarmonyRenderer
from agentgym.chat_templates.renderers.mistral import MistralRenderer
from agentgym.chat_templates.renderers.nemotron import NemotronRenderer
from agentgym.chat_templates.renderers.template_probe import CALLING, PLAIN_CALL
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.chat_templates.template_date import present_date
from agentgym.chat_templates.tokenizer import ChatTokenizer, HoldsTokenizer
from agentgym.errors import ConfigError, RenderError
from agentgym.loading import is_code_path
from agentgym.types import JSON

__all__ = [
    "FAMILIES",
    "Family",
    "RendererFactory",
    "family_of",
    "format_to_record",
    "open_renderer",
    "renderer_for",
]

_log = logging.getLogger(__name__)


class RendererFactory(Protocol):
    """Makes a renderer of one family."""

    def __call__(
        self, tokenizer: ChatTokenizer, *, reply_format: ReplyFormat, variables: Mapping[str, JSON] | None = None
    ) -> TemplateRenderer:
        """Returns a renderer; raises RenderError if the tokenizer's template is not of the family."""


@dataclass(frozen=True, slots=True)
class Family:
    """Models that share a chat format: `Family("hermes", ("<|im_start|>", "<tool_call>"), ChatMLRenderer)`."""

    name: str
    """The name of the family's reply format."""
    fragments: tuple[str, ...]
    """Texts that a template of the family contains, all of them."""
    renderer: RendererFactory = TemplateRenderer
    tokens: tuple[str, ...] = ()
    """Texts that its tokenizer has an id for, all of them: for a template that does not show how the model calls."""


FAMILIES: tuple[Family, ...] = (
    Family("gpt_oss", ("<|start|>", "<|channel|>", "<|call|>"), HarmonyRenderer),
    Family("deepseek_v32", ("｜DSML｜",), DeepSeekV32Renderer),
    Family("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json"), DeepSeekRenderer),
    Family("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    Family("deepseek_v3", ("<｜Assistant｜>",), DeepSeekRenderer),
    Family("kimi_k2", ("<|im_middle|>",)),
    Family("hy3", ("<｜hy_eos", ":opensource")),
    Family("kimi_k3", ("<|open|>", "<|end_of_msg|>")),
    Family("glm45", ("<|observation|>",)),
    Family("minimax_m2", ("<minimax:tool_call>",)),
    Family("minimax_m1", ("<beginning_of_sentence>", "<tool_calls>")),
    Family("command_r7b", ("<|START_ACTION|>",), CommandRenderer),
    Family("gemma4", ("<|turn>", "<|tool_call>"), Gemma4Renderer),
    Family("function_gemma", ("<start_function_call>",)),
    Family("gemma2_generic", ("<start_of_turn>",)),
    Family("mistral", ("[TOOL_CALLS]",), MistralRenderer),
    Family("mistral", ("[INST]",), MistralRenderer),
    Family("nemotron", ("<TOOLCALL>", "/no_think"), NemotronRenderer),
    Family("nemotron", ("<TOOLCALL>",)),
    Family("seed_oss", ("<seed:tool_call>",)),
    Family("functionary", ("<|start_header_id|>", "<function=")),
    Family("functionary", ("<|start_header_id|>", ">>>all")),
    Family("qwen3_coder", ("<|im_start|>", "<function="), ChatMLRenderer),
    Family("pythonic", ("<|header_start|>",)),
    Family("llama3_json", ("<|start_header_id|>",)),
    Family("granite", ("<|start_of_role|>", "<|tool_call|>")),
    Family("granite4", ("<|start_of_role|>", "<tool_call>")),
    Family("granite", ("<|start_of_role|>",)),
    Family("hermes", ("<|im_start|>", "<|function_output|>"), BielikRenderer),
    Family("lfm2", ("<|im_start|>", "<|tool_list_start|>"), ChatMLRenderer),
    Family("lfm2", ("<|im_start|>", "<|tool_call_start|>"), ChatMLRenderer),
    Family("internlm2", ("<|im_start|>", "<|action_start|>"), ChatMLRenderer),
    Family("olmo3_pythonic", ("<|im_start|>", "<function_calls>"), ChatMLRenderer),
    Family("lfm2", ("<|im_start|>",), ChatMLRenderer, tokens=("<|tool_call_start|>", "<|tool_call_end|>")),
    Family("phi4_mini", ("<|end|>", "<|assistant|>")),
    Family("hermes", ("<|im_start|>",), ChatMLRenderer),
)
"""The families in the order in which a template is compared with them.

If a family's format does not read the calls that the template writes, the first format that does is used; a format
without a family is found in that way too, or requested by name."""


def family_of(tokenizer: ChatTokenizer) -> Family | None:
    """Returns the family whose texts the tokenizer and its template contain, or None if there is none."""
    template, has = tokenizer.template + tokenizer.tool_template, tokenizer.backend.token_to_id
    for family in FAMILIES:
        is_written = all(fragment in template for fragment in family.fragments)
        if is_written and all(has(token) is not None for token in family.tokens):
            return family
    return None


def open_renderer(
    folder: str | Path,
    family: str | None = None,
    *,
    date: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Renderer:
    """Returns the renderer of a model folder as `renderer_for` does, or the user's own, which need have no template.

    The user's own is made by the function that `family` names, `path/to/file.py:name`.
    """
    if family is None or not is_code_path(family):
        return renderer_for(folder, family, date=date, variables=variables)
    tokenizer = ChatTokenizer.load(folder, needs_template=False)
    variables = recorded_format(Path(folder)).variables_with(variables or {})
    return make_custom_renderer(family, tokenizer, {"strftime_now": date or present_date(), **variables})


def format_to_record(
    renderer: Renderer, family: str | None, *, date: str, given_date: str | None
) -> tuple[str | None, str | None]:
    """Returns the family and the date with which `open_renderer` makes this renderer again.

    `date` is the one it was made with, which only a template that writes it needs; `given_date` is the user's.
    """
    if not isinstance(renderer, TemplateRenderer) or (family and is_code_path(family)):
        return family, date
    return renderer.reply_format.name, date if renderer.tokenizer.writes_date else given_date


def renderer_for(
    model: str | Path | ChatTokenizer | HoldsTokenizer,
    family: str | None = None,
    *,
    variables: Mapping[str, JSON] | None = None,
    date: str | None = None,
) -> TemplateRenderer:
    """Returns the renderer of a model folder or tokenizer.

    `family` is a name of `FORMATS`, or of a function of one's own; without one a checkpoint has that of its run, else
    the template decides, and an unknown one gets the first format that reads its calls. `variables` go to the template
    (`{"enable_thinking": False}` for Qwen3) beside those of a checkpoint's run. `date` is its present moment
    (`2026-03-01T08:30:00`), by default that of this call. Raises RunFolderError for a missing folder or tokenizer,
    UnknownName for an unknown family, RenderError for a template that is missing or cannot be continued exactly,
    ConfigError for a renderer without a template, and for a checkpoint of one's own renderer without `family`.
    """
    if isinstance(model, str | Path):
        record = recorded_format(Path(model))
        family, variables = family or record.family_for(model), record.variables_with(variables or {})
        tokenizer = ChatTokenizer.load(model)
    else:
        tokenizer = model if isinstance(model, ChatTokenizer) else ChatTokenizer.of(model)
    variables = {"strftime_now": date or present_date(), **(variables or {})}
    if family is not None and is_code_path(family):
        own = make_custom_renderer(family, tokenizer, variables)
        if not isinstance(own, TemplateRenderer):
            raise ConfigError(
                f"{family!r} returns a {type(own).__name__}: recorded conversations are learned, and models verified,"
                " with an agentgym.chat_templates.TemplateRenderer or a class that derives from it"
            )
        return own
    own_family = family_of(tokenizer)
    if family is not None:
        form = FORMATS[family]
        if own_family is None or FORMATS[own_family.name] is not form:
            own_family = Family(
                form.name,
                (),
                next((f.renderer for f in FAMILIES if FORMATS[f.name] is form), TemplateRenderer),
            )
    if own_family is None:
        return _reading(TemplateRenderer(tokenizer, reply_format=HERMES, variables=variables), variables)
    renderer = _of_family(own_family, tokenizer, variables)
    return renderer if family is not None else _reading(renderer, variables)


def _of_family(family: Family, tokenizer: ChatTokenizer, variables: Mapping[str, JSON] | None) -> TemplateRenderer:
    """Returns the family's renderer, or the general one if the family's does not fit the template."""
    try:
        return family.renderer(tokenizer, reply_format=FORMATS[family.name], variables=variables)
    except RenderError as error:
        if family.renderer is TemplateRenderer:
            raise
        _log.warning("the chat template of %r is driven by Jinja at every turn: %s", tokenizer.name, error)
    return TemplateRenderer(tokenizer, reply_format=FORMATS[family.name], variables=variables)


def _reading(renderer: TemplateRenderer, variables: Mapping[str, JSON] | None) -> TemplateRenderer:
    """Returns `renderer`, or one like it with the first format that reads the calls which the template writes.

    A format that reads only calls whose arguments are numbers will do: a template may write texts without the quotes
    that the model puts around them.
    """
    if renderer.reads_calls:
        return renderer
    for call in (CALLING, PLAIN_CALL):
        for reply_format in dict.fromkeys(FORMATS.values()):
            if renderer.can_read(reply_format, call):
                other = type(renderer)(renderer.tokenizer, reply_format=reply_format, variables=variables)
                if other.can_read(reply_format, call):  # with its own end tokens too, which the formats do not share
                    return other
    return renderer
