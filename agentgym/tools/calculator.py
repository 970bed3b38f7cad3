"""The tool `calculator`: exact arithmetic."""

from __future__ import annotations

from agentgym.tools.calling.definition import tool
from agentgym.tools.expression import evaluate_expression, format_value

__all__ = ["calculator"]


@tool(blocking=False)
def calculator(expression: str) -> str:
    """Works out an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ^ ( ), and sqrt, abs, round, floor, ceil; such as (80000 + 50000) * 1.5
    """
    return format_value(evaluate_expression(expression))
