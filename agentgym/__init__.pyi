from agentgym.envs.base.text_env import TextEnv as TextEnv
from agentgym.envs.base.tool_env import ToolEnv as ToolEnv
from agentgym.evaluation.play.config import EvalConfig as EvalConfig
from agentgym.evaluation.play.evaluate import evaluate as evaluate
from agentgym.evaluation.play.model_engine import create_engine as create_engine
from agentgym.evaluation.play.model_engine import run_episode as run_episode
from agentgym.rollout.agents.agent_episode import AgentEpisode as AgentEpisode
from agentgym.tools.calling.definition import tool as tool
from agentgym.trainers.config import TrainConfig as TrainConfig
from agentgym.trainers.loop.trainer import Trainer as Trainer
from agentgym.trajectory import Trajectory as Trajectory

__version__: str
