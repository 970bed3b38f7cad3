"""The limits of one process that hold in every box."""

import contextlib
import resource

from agentgym.tools.sandbox.box.kernel import limit
from agentgym.tools.sandbox.box.plan import Plan

__all__ = ["limit_resources"]


def limit_resources(plan: Plan) -> None:
    """Bounds memory, processor time, file sizes and open files of this process, for good; no core dump."""
    limit(resource.RLIMIT_AS, plan.memory_bytes)
    limit(resource.RLIMIT_CPU, int(plan.time_limit_s) + 2)
    limit(resource.RLIMIT_FSIZE, plan.scratch_bytes)
    limit(resource.RLIMIT_NOFILE, plan.num_open_files)
    limit(resource.RLIMIT_MEMLOCK, 0)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_MSGQUEUE, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # where the machine runs out of memory, this goes first
