"""The C++ compiler with which `torch.compile` speeds the in-process engine up; without one the engine runs as it is."""

from __future__ import annotations

import os
import shutil

__all__ = ["cpp_compiler"]


def cpp_compiler() -> str | None:
    """The compiler that `torch.compile` uses: what the variable CXX names, or g++, or clang++; None without one."""
    named = os.environ.get("CXX")
    return next(filter(None, (shutil.which(name) for name in ([named] if named else ["g++", "clang++"]))), None)
