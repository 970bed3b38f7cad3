"""The process that compares answers: a line of JSON in, `true` or `false` out.

It is run as a file and imports math-verify alone. SymPy may compute for ever, or take all memory: then it is killed
from outside, or by its own limits where nobody is left to do so.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys

MOST_BYTES = 2 << 30
ALARM_S = 60


def main() -> None:
    """Answers until standard input ends."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    kinds = [math_verify.LatexExtractionConfig()]
    print("ready", flush=True)
    for line in sys.stdin:
        signal.alarm(ALARM_S)
        gold, answer = (
            math_verify.parse(f"\\boxed{{{text}}}", kinds, parsing_timeout=None) for text in json.loads(line)
        )
        equal = bool(gold) and bool(answer) and math_verify.verify(gold, answer, timeout_seconds=None)
        signal.alarm(0)
        print(json.dumps(bool(equal)), flush=True)


if __name__ == "__main__":
    main()
