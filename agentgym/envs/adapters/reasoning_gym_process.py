"""The process that scores answers for `reasoning_gym/`: it reads lines of pickles in base64, and answers each with
JSON, `[score, error, is_fault]`.

It is run as a file. Scorers of reasoning-gym pass a model's text to `eval` and to SymPy: here `eval` takes numbers,
lists and formulas alone, and a computation without end is ended by its own limits, which count its computing time.
"""

from __future__ import annotations

import ast
import base64
import errno
import json
import os
import pickle
import random
import resource
import signal
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

MAX_BYTES = 2 << 30
"""The memory for an answer, beyond what the libraries have reserved."""
SYNTAX = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load),
    *(ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.Compare, ast.cmpop),
    *(ast.Name, ast.Call, ast.keyword),
)
"""The syntax that an expression may be made of."""


def checked_eval(text: object, scope: Mapping[str, Any] | None = None, own: Mapping[str, Any] | None = None) -> object:
    """`eval` of values and of SymPy's mathematics; raises ValueError for any other Python."""
    import sympy  # type: ignore[import-untyped]

    names = {**(scope or {}), **(own or {})}
    functions = (sympy.sqrt, sympy.cbrt, sympy.root)
    tree = ast.parse(str(text).strip(), mode="eval")
    for node in ast.walk(tree):
        name = names.get(node.id) if isinstance(node, ast.Name) else sympy.Integer(0)
        is_formula = isinstance(name, sympy.Basic) or (isinstance(name, type) and issubclass(name, sympy.Basic))
        is_named = not isinstance(node, ast.Call) or isinstance(node.func, ast.Name)
        if not isinstance(node, SYNTAX) or not is_named or not (is_formula or name in functions):
            raise ValueError(f"no value and no formula: {ast.unparse(node):.80}")
    return eval(compile(tree, "<answer>", "eval"), {**names, "__builtins__": {}})  # checked above


def score_answer(dataset: str, seed: int, config: dict[str, Any], entry: dict[str, Any], answer: str | None) -> float:
    """The score that the dataset's scorer gives."""
    import numpy as np
    import reasoning_gym

    random.seed(seed)
    np.random.seed(seed % 2**32)
    tasks = reasoning_gym.create_dataset(dataset, seed=seed, size=1, **config)
    return float(tasks.score_answer(answer, entry))


def main(questions: TextIO, answers: TextIO) -> None:
    """Answers until the questions end."""
    import reasoning_gym  # noqa: F401

    warnings.simplefilter("ignore")
    statm = Path("/proc/self/statm")
    num_bytes = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes + MAX_BYTES, num_bytes + MAX_BYTES))
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") or name == "sympy.parsing.sympy_parser":
            vars(module)["eval"] = checked_eval  # in place of the builtin
    print("ready", file=answers, flush=True)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in questions:
        dataset, seed, config, entry, answer, limit_s = pickle.loads(base64.b64decode(line))
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        outcome: tuple[float | None, str, bool]
        try:
            outcome = score_answer(dataset, seed, config, entry, answer), "", False
        except Exception as error:  # noqa: BLE001  # the boundary: a scorer is foreign code
            is_fault = isinstance(error, OSError) and error.errno != errno.ENOMEM  # memory is limited for the answer
            outcome = None, f"{type(error).__name__}: {error}", is_fault
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(outcome), file=answers, flush=True)


if __name__ == "__main__":
    own_stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a scorer prints is no answer
    main(sys.stdin, own_stdout)
