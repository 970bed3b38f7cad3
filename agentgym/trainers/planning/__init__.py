"""Estimates of a training run's memory and speed, from its shapes and the speeds of devices."""
