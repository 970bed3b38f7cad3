"""Compares two answers in LaTeX as mathematics, by math-verify, within a time limit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from agentgym.errors import ConfigError
from agentgym.extras import install_extra
from agentgym.tools.line_process import LineProcess

__all__ = ["equal_answers", "math_verify_or_raise"]

LIMIT_S = 5.0


def math_verify_or_raise() -> None:
    """Raises ConfigError if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"Math-v0 compares answers by math-verify: {install_extra('rewards')}")


def equal_answers(gold: str, answer: str, *, limit_s: float = LIMIT_S) -> bool:
    """True if `answer` equals `gold`; False if it cannot be read, or takes more than `limit_s` of computing.

    Raises EnvironmentFault if the machine did not let them be compared.
    """
    return _comparer.ask(json.dumps([gold, answer, limit_s]), limit_s) == "true"


_comparer = LineProcess(
    Path(__file__).with_name("equality_process.py"),
    "the process that compares answers did not start: python -c 'import math_verify'",
)
