"""The launcher hands the secret to SGLang's server, whatever its first character is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import agentgym.engines.sglang.launcher

SERVER = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--api-key")
parser.add_argument("--port")
print(parser.parse_args())
"""


@pytest.mark.parametrize("secret", ["abc", "-abc", "--abc", "a=b"])
def test_the_server_gets_the_whole_secret(secret: str, tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text(SERVER)
    words = [sys.executable, agentgym.engines.sglang.launcher.__file__, "--port", "1"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "AGENTGYM_SERVER_SECRET": secret}
    result = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == f"Namespace(api_key={secret!r}, port='1')"
