"""Folders that a program leaves."""

import contextlib
import os

__all__ = ["make_removable"]


def make_removable(folder: str) -> None:
    """Opens folders below one, which a program's umask, mkdir or chmod may have made so that nobody enters."""
    for parent, names, _ in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
