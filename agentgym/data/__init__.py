"""Tasks from files and Python generators: reading, limiting the length, holding out, and ordering."""

from agentgym.data.config import COLUMNS, DataConfig, env_of_data
from agentgym.data.lengths import CountTokens
from agentgym.data.loader import TaskLoader
from agentgym.data.task_data import TaskData, open_data

__all__ = ["COLUMNS", "CountTokens", "DataConfig", "TaskData", "TaskLoader", "env_of_data", "open_data"]
