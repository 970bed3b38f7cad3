"""The published names of the linear layers that share a matrix of the decoder."""

from __future__ import annotations

__all__ = ["GATE_UP", "QKV"]

QKV = ("q_proj", "k_proj", "v_proj")
"""The published projections that share one matrix of the decoder, in this order along its outputs."""
GATE_UP = ("gate_proj", "up_proj")
"""The published projections of the feed-forward that share one matrix, in this order along its outputs."""
