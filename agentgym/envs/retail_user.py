"""The simulated customer: the public names of `agentgym.envs.tasks.retail.customer`."""

from agentgym.envs.tasks.retail.customer import Brief, ScriptedUser, SimulatedUser

__all__ = ["Brief", "ScriptedUser", "SimulatedUser"]
