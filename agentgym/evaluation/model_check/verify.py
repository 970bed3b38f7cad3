"""`verify_model`: checks, before any training, that a tokenizer with its chat template can be trained on exactly."""

from __future__ import annotations

import logging

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.errors import RenderError
from agentgym.evaluation.model_check.cases import cases_of, with_own_ids
from agentgym.evaluation.model_check.checks import (
    ModelUnderTest,
    Reference,
    check_cut,
    check_extend,
    check_parse,
    check_render,
    check_stop,
)
from agentgym.evaluation.model_check.findings import ModelFindings, ModelReport, verdicts_of
from agentgym.evaluation.model_check.traps import (
    check_ids,
    check_malformed,
    check_marks,
    check_repeatable,
    check_resampled,
    check_round_trip,
    check_shown,
    check_spelled,
)
from agentgym.testing.contracts.conversations import CONVERSATIONS

__all__ = ["verify_model"]

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


def verify_model(
    tokenizer: ChatTokenizer, family: str | None = None, reference: Reference | str = "no reference was given"
) -> ModelReport:
    """Checks `PROPERTIES` of a tokenizer and template, over the hundred conversations of `CONVERSATIONS`.

    `family` is a name of `FORMATS`; without one the template decides. `reference` renders as transformers does, or is
    the reason why nothing does. Raises UnknownName for an unknown family; what is wrong with the model is reported.
    """
    findings = ModelFindings()
    log = logging.getLogger("agentgym.chat_templates")
    level = log.level
    log.setLevel(logging.ERROR)  # the warnings of renderers, once per run, are in the report
    try:
        return _verify(findings, tokenizer, family, reference)
    finally:
        log.setLevel(level)


def _verify(
    findings: ModelFindings, tokenizer: ChatTokenizer, family: str | None, reference: Reference | str
) -> ModelReport:
    try:
        renderer = renderer_for(tokenizer, family)
    except RenderError as error:
        findings.add_failure("renderer", tokenizer.name, str(error))
        for name in findings.tallies:
            findings.skip(name, "there is no renderer")
        return ModelReport(tokenizer.name, family or "unknown", "no renderer", 0, verdicts_of(findings))
    findings.add_pass("renderer")
    return _report(findings, renderer, reference)


def _report(findings: ModelFindings, renderer: TemplateRenderer, reference: Reference | str) -> ModelReport:
    conversations = with_own_ids(renderer, CONVERSATIONS)
    subject = ModelUnderTest(renderer, conversations, tuple(cases_of(renderer, conversations)), reference)
    for check in CHECKS:
        check(findings, subject)
    kind = type(renderer).__name__
    name, family = renderer.tokenizer.name, renderer.reply_format.name
    return ModelReport(name, family, kind, len(CONVERSATIONS), verdicts_of(findings))
