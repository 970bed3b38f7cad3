"""Exports of checkpoints: the public names of `agentgym.trainers.checkpoints.export`."""

from agentgym.trainers.checkpoints.export import DType, Exported, export_adapter, export_model, find_checkpoint

__all__ = ["DType", "Exported", "export_adapter", "export_model", "find_checkpoint"]
