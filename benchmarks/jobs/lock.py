from agentgym.envs import Policy, Script, ScriptedPolicy, ToolEnv
from agentgym.tools import tool


class Lock(ToolEnv):
    system_prompt = "Open the lock."
    max_turns = 8

    def start(self, options: dict) -> str:
        self.code = int(self.np_random.integers(10))
        return "It has a dial from 0 to 9."

    @tool
    def turn(self, digit: int) -> str:
        """Turns the dial to a digit."""
        if digit == self.code:
            self.end(success=True, reward=1.0)
            return "It opens."
        return "Higher." if digit < self.code else "Lower."

    def make_oracle(self) -> Policy:
        return ScriptedPolicy(self.solve)

    def solve(self, observation: str) -> Script:
        low, high = 0, 9
        while True:
            digit = (low + high) // 2
            answer = yield "turn", {"digit": digit}
            low, high = (digit + 1, high) if answer.startswith("Higher") else (low, digit - 1)
