"""Contract tests that users run on their own parts."""

from agentgym.testing.contracts.engine import check_engine
from agentgym.testing.contracts.env import Finding, Verdict, check_env, examine_env
from agentgym.testing.contracts.renderer import check_renderer

__all__ = ["Finding", "Verdict", "check_engine", "check_env", "check_renderer", "examine_env"]
