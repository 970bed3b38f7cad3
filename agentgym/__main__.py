"""`python -m agentgym` is the command `agentgym`."""

from __future__ import annotations

import sys

from agentgym.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
