"""Training on a Ray cluster: engines, environment workers and learner ranks are actors; `actors.py` imports Ray."""
