from agentgym.evaluation.config import EvalConfig as EvalConfig
from agentgym.evaluation.evaluate import evaluate as evaluate
from agentgym.evaluation.model_engine import create_engine as create_engine
from agentgym.evaluation.model_engine import run_episode as run_episode
from agentgym.trainers.config import TrainConfig as TrainConfig
from agentgym.trainers.trainer import Trainer as Trainer

__version__: str
