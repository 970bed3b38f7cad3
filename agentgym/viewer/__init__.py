"""Views of a run: `write_report` writes its self-contained page, `write_curve` its learning curve.

`RunIndex` finds its episodes.
"""

from agentgym.viewer.curve import write_curve
from agentgym.viewer.index.causes import FailureGroup, failure_groups
from agentgym.viewer.index.filters import EpisodeFilter, count_values, find_lines, find_rows
from agentgym.viewer.index.run_index import RunIndex
from agentgym.viewer.report import ReportPage, write_page, write_report
from agentgym.viewer.run_data import EpisodeSummary, EvaluationPoint, RunData, check_run_folder, read_run
from agentgym.viewer.token_text import TokenText, TokenTexts, visible

__all__ = [
    "EpisodeFilter",
    "EpisodeSummary",
    "EvaluationPoint",
    "FailureGroup",
    "ReportPage",
    "RunData",
    "RunIndex",
    "TokenText",
    "TokenTexts",
    "check_run_folder",
    "count_values",
    "failure_groups",
    "find_lines",
    "find_rows",
    "read_run",
    "visible",
    "write_curve",
    "write_page",
    "write_report",
]
