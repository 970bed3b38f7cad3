"""Launches SGLang's server, in SGLang's own process, and passes it the secret, which no command line shows.

Run as a module by SGLang's interpreter, as a file of its own: it imports nothing of agentgym.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    sys.argv.append(f"--api-key={os.environ['AGENTGYM_SERVER_SECRET']}")  # one word: a secret may begin with a dash
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
