"""The command line."""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`, which take long to load
import os
import sys


def end_at_once(number: int, frame: object) -> None:
    """Handles Ctrl-C while the libraries of a command are loaded: there is nothing to put in order yet."""
    os.write(2, b"error: interrupted\n")
    if "--json" in sys.argv:
        os.write(1, b'{"error": "interrupted"}\n')
    os._exit(130)


STARTS = ("bin/agentgym", "agentgym/__main__.py")
is_command = sys.argv[0].endswith(STARTS) and "multiprocessing" not in sys.modules  # a child of it has its sys.argv
if is_command and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, end_at_once)  # `main` restores the default
