"""The names of opponents that are no policies."""

from __future__ import annotations

__all__ = ["SELF"]

SELF = "self"
"""The value of the keyword `opponent` with which the caller plays every seat."""
