"""Validators of a JSON Schema's own dialect, whose patterns are JavaScript's and match in bounded time."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jsonschema
import regex  # type: ignore[import-untyped]  # has what JavaScript has and `re` lacks, and a time limit
from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator

from agentgym.errors import ToolSchemaError

__all__ = ["validator_of"]

DIALECTS = {
    "2020-12": jsonschema.Draft202012Validator,
    "2019-09": jsonschema.Draft201909Validator,
    "draft-07": jsonschema.Draft7Validator,
    "draft-06": jsonschema.Draft6Validator,
    "draft-04": jsonschema.Draft4Validator,
}
"""The dialects by what is in their `$schema`, the newest first."""
MATCH_S = 0.2
MAX_PARTS = 100_000
"""The most parts of a pattern with its repetitions written out, as `regex` compiles it; it takes 270 bytes a part."""
PART = regex.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<times>\d+)(?:,\d*)?\}|.", regex.DOTALL)
JAVASCRIPT = regex.compile(r"\\u\{(?P<code>[0-9A-Fa-f]{1,6})\}|(?P<name>\\k<)|(?P<any>\[\^\])|\\.", regex.DOTALL)
"""Spellings of JavaScript that `regex` lacks; another escape is skipped whole."""


def validator_of(schema: Mapping[str, Any]) -> Validator:
    """Returns the validator of the dialect that `$schema` names, else of the newest one whose schema this is.

    Raises ToolSchemaError for a schema that is none.
    """
    _check_keywords(schema)
    dialects = [dialect for dialect in DIALECTS if dialect in str(schema.get("$schema"))]
    refusal = ""
    for dialect in dialects or DIALECTS:
        try:
            DIALECTS[dialect].check_schema(dict(schema), format_checker=_formats())
        except jsonschema.SchemaError as error:
            reason = f"{error.message} ({error.cause})" if error.cause else error.message
            refusal = refusal or f"not a JSON Schema of the dialect {dialect} at {error.json_path}: {reason}"
        else:  # without `$schema`, for which jsonschema would leave our class where a $ref leads back to the root
            return _validator_class(dialect)({key: part for key, part in schema.items() if key != "$schema"})
    raise ToolSchemaError(refusal)


def _check_keywords(schema: Mapping[str, Any]) -> None:
    text = json.dumps(schema, default=str)
    if all(f'"{name}":' in text for name in ("unevaluatedProperties", "patternProperties")):  # would be matched by `re`
        raise ToolSchemaError("unevaluatedProperties beside patternProperties is not supported: name the properties")


@functools.cache
def _formats() -> jsonschema.FormatChecker:
    checker = jsonschema.FormatChecker(())
    checker.checks("regex", raises=regex.error)(lambda text: not isinstance(text, str) or bool(_compile(text)))
    return checker


@functools.cache
def _validator_class(dialect: str) -> type[Validator]:
    plain = DIALECTS[dialect]

    def check_additional(validator: Any, allowed: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(value, dict) and (patterns := schema.get("patternProperties")):
            fits: dict[str, Any] = {name: {} for name in value if any(_search(pattern, name) for pattern in patterns)}
            schema = {**schema, "patternProperties": {}, "properties": {**fits, **schema.get("properties", {})}}
        yield from plain.VALIDATORS["additionalProperties"](validator, allowed, value, schema)

    checks = {"pattern": _check_pattern, "patternProperties": _check_properties}
    extend: Callable[..., type[Validator]] = jsonschema.validators.extend
    return extend(plain, {**checks, "additionalProperties": check_additional})


def _check_pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not _search(pattern, value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _check_properties(validator: Any, patterns: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    for pattern, part in patterns.items() if isinstance(value, dict) else ():
        for name in value:
            if _search(pattern, name):
                yield from validator.descend(value[name], part, path=name, schema_path=pattern)


def _search(pattern: str, text: str) -> bool:
    """Returns whether `pattern` is in `text`; raises TimeoutError if that takes too long to find out."""
    try:
        return _compile(pattern).search(text, timeout=MATCH_S) is not None
    except TimeoutError:
        raise TimeoutError(f"{text!r:.80} cannot be compared with {pattern!r:.80} in {MATCH_S} s") from None


@functools.lru_cache(maxsize=1024)
def _compile(pattern: str) -> Any:
    if _num_parts(pattern) > MAX_PARTS:
        raise regex.error(f"the pattern {pattern!r:.80} repeats more than {MAX_PARTS:,} parts")
    return regex.compile(JAVASCRIPT.sub(_rewrite, pattern))


def _num_parts(pattern: str) -> int:
    """Returns the number of a pattern's parts where each is written out as often as it is to be there at least."""
    groups, last = [0], 0
    for part in PART.finditer(pattern):
        if part["times"] is not None:
            groups[-1] += last * (int(part["times"]) - 1)
            last *= int(part["times"])
        elif part[0] == "(":
            groups.append(0)
        elif part[0] == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        else:
            last = 1
            groups[-1] += 1
    return groups[-1]


def _rewrite(spelling: Any) -> str:
    if spelling["code"]:
        return f"\\U{int(spelling['code'], 16):08x}"
    return r"\g<" if spelling["name"] else r"[\s\S]" if spelling["any"] else str(spelling[0])
