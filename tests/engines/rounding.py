"""The largest difference between an engine's logprobs and the trainer's that rounding of float32 explains."""

MEAN = 1e-6
"""It is about 1e-7 at the embedded model."""
LARGEST = 1e-3
"""Of thousands of ids: the trainer's own are up to 4e-5 from those in float64, and a missed update is over 1e-2."""


def is_rounding(mean: float, largest: float) -> bool:
    """Whether these differences, in nats, are rounding alone."""
    return mean < MEAN and largest < LARGEST
