"""Views of a run: `write_report` writes its self-contained page, `write_curve` its learning curve."""

from agentgym.viewer.curve import write_curve
from agentgym.viewer.report import write_report
from agentgym.viewer.run_data import EpisodeSummary, EvaluationPoint, RunData, read_run
from agentgym.viewer.token_text import TokenText, visible

__all__ = [
    "EpisodeSummary",
    "EvaluationPoint",
    "RunData",
    "TokenText",
    "read_run",
    "visible",
    "write_curve",
    "write_report",
]
