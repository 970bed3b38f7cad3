"""TRL in an environment of its own (about 1.5 GB under the user's cache folder): the package does not depend on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["run_beside_trl", "trl_python"]

REQUIREMENTS = ("torch==2.13.0", "trl==1.16.*")
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"


def trl_python() -> Path:
    """Returns the interpreter of TRL's environment, which is made on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "agentgym-benchmarks" / "trl-1.16"
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        print(f"making an environment for TRL in {folder} (once; minutes)", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), *REQUIREMENTS]
        subprocess.run(install, check=True)
        done.touch()
    return python


def run_beside_trl(script: Path, spec: Mapping[str, object]) -> dict[str, Any]:
    """Runs the script in TRL's environment and returns the line of JSON with which it ends.

    The script is given the path of the specification, a JSON file. `output` in it is a folder that lives as long.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "spec.json")
        path.write_text(json.dumps({"output": scratch, **spec}))
        done = subprocess.run([str(trl_python()), str(script), str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
