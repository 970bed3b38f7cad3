"""The command that installs an extra of agentgym: one place, as it depends on where agentgym came from."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["DISTRIBUTION", "install_extra"]

DISTRIBUTION = "agentgym-llm"


def install_extra(extra: str) -> str:
    """Returns the command that adds an extra (`wandb`, or several: `gguf,train`) to this installation.

    It names the clone, file or repository that pip recorded (PEP 610), or a clone where nothing is recorded.
    """
    origin = _origin()
    address = str(origin.get("url", ""))
    folder = Path(unquote(urlsplit(address).path)) if address.startswith("file:") else None
    if "dir_info" in origin and folder is not None and folder.is_dir():
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}{shlex.quote(f'{folder}[{extra}]')}"
    if "vcs_info" in origin:
        address = f"{origin['vcs_info']['vcs']}+{address}"
    elif "archive_info" not in origin:
        return f"pip install '.[{extra}]' in a clone of agentgym"
    return f"pip install {shlex.quote(f'{DISTRIBUTION}[{extra}] @ {address}')}"


def _origin() -> dict[str, Any]:
    """Returns what pip recorded on the source of the installation; empty for an index, and for no installation."""
    try:
        text = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    origin = json.loads(text or "{}")
    return origin if isinstance(origin, dict) else {}
