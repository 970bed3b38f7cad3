"""Contract tests that users run on their own parts."""

from agentgym.testing.engine import check_engine
from agentgym.testing.env import Finding, check_env

__all__ = ["Finding", "check_engine", "check_env"]
