"""The C++ compiler with which `torch.compile` speeds up the in-process engine; without one it runs uncompiled."""

from __future__ import annotations

import os
import shutil

__all__ = ["cpp_compiler"]


def cpp_compiler() -> str | None:
    """Returns the compiler that `torch.compile` uses: the value of CXX, g++, or clang++; None without one."""
    named = os.environ.get("CXX")
    return next(filter(None, (shutil.which(name) for name in ([named] if named else ["g++", "clang++"]))), None)
