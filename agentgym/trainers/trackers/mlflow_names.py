"""The names of metrics and settings in MLflow, which takes fewer characters than ours have."""

from __future__ import annotations

import re

__all__ = ["mlflow_name"]

_MAX_NAME = 250  # the limit of MLflow


def mlflow_name(name: str) -> str:
    """Returns a name that MLflow takes: letters, digits and `_-. :/`, of at most 250, and a path inside of its folder.

    >>> mlflow_name("pass@1"), mlflow_name("eval_success/../own.py:Lock")
    ('pass_1', 'eval_success/__/own.py:Lock')
    """
    name = re.sub(r"[^\w./: -]", "_", name)
    parts = [part if part.strip(".") else part.replace(".", "_") for part in name.split("/") if part]
    return "/".join(parts)[:_MAX_NAME].rstrip("/") or "_"
