"""Contract tests that users run on their own parts."""

from agentgym.testing.engine import check_engine
from agentgym.testing.env import Finding, Verdict, check_env, examine_env

__all__ = ["Finding", "Verdict", "check_engine", "check_env", "examine_env"]
