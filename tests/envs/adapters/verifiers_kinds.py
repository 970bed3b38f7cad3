"""The kinds of tasks in `verifiers_faults.py`, which an interpreter without verifiers cannot import."""

KINDS = ("raises", "dies", "hangs", "sleeps", "prints", "pays no number", "pays")
