"""Checks before any training that a tokenizer with its chat template can be trained on exactly."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.jinja_template import ChatTemplate
from agentgym.chat_templates.recorded_format import recorded_format
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.errors import ConfigError, RenderError
from agentgym.testing.contracts.conversations import CONVERSATIONS
from agentgym.trainers.model_check.findings import TemplateFindings, TemplateReport
from agentgym.trainers.model_check.template_cases import cases_of, with_own_ids
from agentgym.trainers.model_check.template_checks import (
    Reference,
    TemplateUnderTest,
    check_cut,
    check_extend,
    check_parse,
    check_render,
    check_stop,
)
from agentgym.trainers.model_check.template_traps import (
    check_ids,
    check_malformed,
    check_marks,
    check_repeatable,
    check_resampled,
    check_round_trip,
    check_shown,
    check_spelled,
)

__all__ = ["check_chat_template", "check_folder_template"]

CHECKS = (
    check_ids,
    check_render,
    check_shown,
    check_extend,
    check_cut,
    check_stop,
    check_parse,
    check_malformed,
    check_marks,
    check_spelled,
    check_round_trip,
    check_resampled,
    check_repeatable,
)


def check_folder_template(folder: Path, template: str | None = None, family: str | None = None) -> TemplateReport:
    """Checks the tokenizer of a model folder with its chat template, or with another one.

    Raises ConfigError for a folder without a tokenizer, or without a template that compiles.
    """
    try:
        tokenizer = ChatTokenizer.load(folder, template)
        for source in (tokenizer.template, tokenizer.tool_template):
            ChatTemplate(source, {})
    except RenderError as error:
        hint = "" if "--chat-template" in str(error) else "; --chat-template FILE names another one"
        raise ConfigError(f"{error}{hint}") from error
    return check_chat_template(
        tokenizer, family or recorded_format(folder).family_for(folder), _reference(folder, template)
    )


def _reference(folder: Path, template: str | None) -> Reference | str:
    """Loads the folder with transformers; returns the reason as text if that fails."""
    try:
        module = import_module("agentgym.trainers.model_check.reference")
        reference: Reference = module.TransformersReference.load(folder, template)
    except Exception as error:  # noqa: BLE001  # the boundary: transformers guesses at a folder in many ways
        return f"transformers does not load it: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return reference


def check_chat_template(
    tokenizer: ChatTokenizer, family: str | None = None, reference: Reference | str = "no reference was given"
) -> TemplateReport:
    """Checks `PROPERTIES` of a tokenizer and template, over the hundred conversations of `CONVERSATIONS`.

    `family` is a name of `FORMATS`; without one the template decides. `reference` renders as transformers does, or is
    the reason why nothing does. Raises UnknownName for an unknown family; what is wrong with the model is reported.
    """
    findings = TemplateFindings()
    log = logging.getLogger("agentgym.chat_templates")
    level = log.level
    log.setLevel(logging.ERROR)  # the warnings of renderers, once per run, are in the report
    try:
        return _check(findings, tokenizer, family, reference)
    finally:
        log.setLevel(level)


def _check(
    findings: TemplateFindings, tokenizer: ChatTokenizer, family: str | None, reference: Reference | str
) -> TemplateReport:
    try:
        renderer = renderer_for(tokenizer, family)
    except RenderError as error:
        findings.add_failure("renderer", tokenizer.name, str(error))
        for name in findings.tallies:
            findings.skip(name, "there is no renderer")
        return TemplateReport(tokenizer.name, family or "unknown", "no renderer", 0, findings.results())
    findings.add_pass("renderer")
    return _report(findings, renderer, reference)


def _report(findings: TemplateFindings, renderer: TemplateRenderer, reference: Reference | str) -> TemplateReport:
    conversations = with_own_ids(renderer, CONVERSATIONS)
    subject = TemplateUnderTest(renderer, conversations, tuple(cases_of(renderer, conversations)), reference)
    for check in CHECKS:
        check(findings, subject)
    kind = type(renderer).__name__
    name, family = renderer.tokenizer.name, renderer.reply_format.name
    return TemplateReport(name, family, kind, len(CONVERSATIONS), findings.results())
