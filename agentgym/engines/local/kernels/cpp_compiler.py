"""The C++ compiler that makes the in-process engine's kernels."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from agentgym.home_folder import ensure_home

__all__ = ["build", "cpp_compiler", "load_library"]

_OPTIONS = ("-std=c++17", "-O3", "-fno-math-errno", "-shared", "-fPIC")
_FUSED = "--param=avoid-fma-max-bits=0"
"""The option of GCC that fuses products with sums everywhere.

On Zen processors it does so in some loops alone, and the bits of a row then depend on those that are computed with it.
"""
_MORE = (
    ("-march=native", "-fopenmp", _FUSED),
    ("-march=native", "-fopenmp"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)  # the first that the compiler takes
_LIMIT_S = 120.0


def cpp_compiler() -> str | None:
    """Returns the compiler: the value of CXX, g++, or clang++; None without one."""
    compiler = os.environ.get("CXX")
    return next(filter(None, (shutil.which(name) for name in ([compiler] if compiler else ["g++", "clang++"]))), None)


def build(source: Path) -> Path:
    """Returns the library that a source file is compiled to, for this processor; it is kept in the user's cache.

    Raises OSError if there is no compiler or it fails, with its last message.
    """
    compiler = cpp_compiler()
    if compiler is None:
        raise FileNotFoundError("no C++ compiler was found: install g++, or name one in CXX")
    texts = [source.read_text(), *(header.read_text() for header in sorted(source.parent.glob("*.h")))]
    key = "\0".join((*texts, compiler, _version(compiler), _processor(), *_OPTIONS, *_MORE[0]))
    name = f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    ensure_home()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentgym"
    if (cache / name).is_file():
        return cache / name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=cache))
    except OSError:  # it cannot be kept: a folder of others, such as one of /tmp, would not be safe to load from
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _compile(source, folder / name, compiler)
        return folder / name
    try:
        _compile(source, folder / name, compiler)
        return (folder / name).replace(cache / name)  # at once, for other processes may do the same
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load_library(source: Path) -> ctypes.CDLL:
    """Compiles a source file and loads its library; raises OSError with the reason if it cannot."""
    try:
        return ctypes.CDLL(str(build(source)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # such as no home folder
        raise OSError(f"a kernel of the engine could not be compiled: {error}") from error


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_LIMIT_S).stdout


def _processor() -> str:
    """Returns what tells processors apart whose instructions differ."""
    described = Path("/proc/cpuinfo")
    if not described.is_file():
        return platform.machine() + platform.processor()
    lines = described.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(source: Path, library: Path, compiler: str) -> None:
    for more in _MORE:
        command = [compiler, *_OPTIONS, *more, str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        if not done.returncode:
            return
    raise OSError(f"{compiler} could not compile {source.name}: {' '.join(done.stderr.split())[-300:]}")
