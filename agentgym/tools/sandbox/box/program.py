"""Runs Python code as its own program, inside a process that a server forked."""

import ast
import atexit
import builtins
import io
import linecache
import os
import sys
import threading
import traceback
import types

__all__ = ["Cell", "adopt", "new_main", "run_python", "run_to_the_end"]

MAX_FRAMES = 100
"""The number of a traceback's last frames that are shown: an endless recursion has a million."""

Cell = tuple[str, str]
"""A name for tracebacks, and the code."""


def adopt(home: str, environment: dict[str, str], packages: tuple[str, ...]) -> None:
    """Makes this process look like a fresh interpreter started in `home`."""
    os.chdir(home)
    os.umask(0o022)
    os.environ.clear()
    os.environ.update(environment)
    for name in [module for module in sys.modules if module.partition(".")[0] == "agentgym"]:
        del sys.modules[name]
    sys.path[:0] = [home]
    sys.path += packages
    sys.argv = ["main.py"]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # they are the process's
    sys.stdout = _writer(1)
    sys.stderr = _writer(2)


def _writer(handle: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(handle, "wb", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def new_main() -> dict[str, object]:
    """Returns the names of a fresh `__main__`."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__dict__["__builtins__"] = builtins
    return main.__dict__


def run_python(cell: Cell, names: dict[str, object], *, shows_last: bool) -> int:
    """Runs code and returns its exit code; an exception prints its traceback to standard error, and is 1.

    `shows_last` prints the value of a last line that is an expression, as a notebook does.
    """
    name, code = cell
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if shows_last and tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            sys.displayhook(eval(compile(ast.Expression(last.value), name, "eval"), names))
    except SystemExit as stop:
        return _exit_code(stop)
    except BaseException as error:  # noqa: BLE001  # whatever a program ends with is its result
        _show(error, name)
        return 1
    finally:
        _flush()
    return 0


def run_to_the_end(cell: Cell) -> int:
    """Runs `run_python` as a whole program: waits for threads, and runs exit functions."""
    code = run_python(cell, new_main(), shows_last=False)
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    _flush()
    return code


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _show(error: BaseException, name: str) -> None:
    """Prints the traceback from the program's first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    try:
        traceback.print_exception(type(error), error, trace, limit=-MAX_FRAMES)
    except BaseException:  # noqa: BLE001  # no memory is left, or its own __str__ raises
        os.write(2, f"{type(error).__name__}\n".encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # noqa: BLE001  # the program closed it
            continue
