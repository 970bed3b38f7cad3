"""Adapters: the public names of `agentgym.trainers.learner.lora`."""

from agentgym.trainers.learner.lora import Adapters, Unadapted, adapt
from agentgym.trainers.settings.lora import LoraConfig

__all__ = ["Adapters", "LoraConfig", "Unadapted", "adapt"]
