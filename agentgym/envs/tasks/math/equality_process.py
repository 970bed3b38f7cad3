"""The process that compares answers: a line of JSON in, `true` or `false` out.

It is run as a file and imports math-verify alone. SymPy may compute for ever, or take all memory: then its own limits
end it, which count its computing time and not how busy the machine is.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys

MAX_BYTES = 2 << 30
FIRST = [[r"2 + \sqrt{2}", r"\sqrt2+2"], ["x^2 - x", "x(x-1)"], [r"\{-1, \frac{1}{2}\}", "0.5, -1"]]
"""The pairs that are compared first, outside of any time limit: they import and fill what later ones need."""


def main() -> None:
    """Answers until standard input ends."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    kinds = [math_verify.LatexExtractionConfig()]

    def equal(*texts: str) -> bool:
        gold, answer = (math_verify.parse(f"\\boxed{{{text}}}", kinds, parsing_timeout=None) for text in texts)
        return bool(gold) and bool(answer) and bool(math_verify.verify(gold, answer, timeout_seconds=None))

    for gold, answer in FIRST:
        equal(gold, answer)
    print("ready", flush=True)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin:
        gold, answer, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        verdict = equal(gold, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
