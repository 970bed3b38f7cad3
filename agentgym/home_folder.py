"""A home folder and a name for a user id that the system does not know, such as a bare number in a container."""

from __future__ import annotations

import atexit
import getpass
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["ensure_home"]


def ensure_home() -> None:
    """Sets HOME and LOGNAME, which libraries read too, if this process has no home folder or no name.

    The folder is a new one, which ends with the process.
    """
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = tempfile.mkdtemp(prefix="agentgym-home-")
        atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = f"uid{os.getuid()}"
