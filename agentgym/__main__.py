"""`python -m agentgym` is the command `agentgym`."""

from __future__ import annotations

from agentgym.cli.main import run

if __name__ == "__main__":
    run()
