"""Estimates of the memory of a training run's GPUs, from the shape of its model and its settings."""
