"""The interpreters with the real libraries."""

from tests.envs.adapters.conftest import openenv_python, verifiers_0_4_python

__all__ = ["openenv_python", "verifiers_0_4_python"]
