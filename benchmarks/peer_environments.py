"""Peers in environments of their own, 1.5 GB each under the user's cache folder: the package does not need them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["is_here", "run_beside", "run_beside_trl"]

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
PEERS: dict[str, Sequence[str]] = {
    "trl-1.16": ["-c", str(CONSTRAINTS), "torch==2.13.0", "trl==1.16.*"],
    # SkyRL's loop needs these alone; all of its trainer needs CUDA.
    "skyrl-0.3": [
        "torch==2.13.0",
        "skyrl==0.3.*",
        "skyrl-gym==0.4.*",
        "ray==2.56.0",
        "tensordict",
        "loguru",
        "aiohttp",
    ],
}
"""What pip installs in each environment."""


def is_here(peer: str) -> bool:
    """True if this interpreter has the peer, in its version."""
    name, _, release = peer.partition("-")
    try:
        return version(name).startswith(f"{release}.")
    except PackageNotFoundError:
        return False


def peer_python(peer: str) -> Path:
    """Returns an interpreter with the peer: this one if it has it, else its environment's, made on first use."""
    if is_here(peer):
        return Path(sys.executable)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "agentgym-benchmarks" / peer
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        print(f"making an environment for {peer} in {folder} (once; minutes)", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PEERS[peer]], check=True)
        done.touch()
    return python


def run_beside(peer: str, script: Path, spec: Mapping[str, object]) -> dict[str, Any]:
    """Runs the script in a peer's environment and returns the line of JSON with which it ends.

    The script is given the path of the specification, a JSON file. `output` in it is a folder that lives as long.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "spec.json")
        path.write_text(json.dumps({"output": scratch, **spec}))
        command = [str(peer_python(peer)), str(script), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{peer} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_beside_trl(script: Path, spec: Mapping[str, object]) -> dict[str, Any]:
    """Runs the script beside TRL."""
    return run_beside("trl-1.16", script, spec)
