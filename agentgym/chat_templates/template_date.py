"""The moment that chat templates get as the present (`strftime_now`), fixed once per run."""

from __future__ import annotations

from datetime import datetime

from agentgym.errors import ConfigError

__all__ = ["check_date", "parse_date", "present_date"]


def present_date() -> str:
    """Returns the present moment in the form that runs record, such as `2026-03-01T08:30:00`."""
    return datetime.now().isoformat(timespec="seconds")


def parse_date(text: str) -> datetime:
    """Returns the moment of a recorded date; raises ConfigError for a text that is not an ISO date."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"date is a day or a moment, such as 2026-03-01 or 2026-03-01T08:30:00; got {text!r}"
        ) from None


def check_date(text: str | None) -> None:
    """Raises ConfigError for a setting that is neither None nor an ISO date."""
    if text is not None:
        parse_date(text)
