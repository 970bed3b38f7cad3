"""Gradients of micro-batches on CPU threads, summed in a fixed order.

Those of a small model are computed in parallel, and the thread count never changes a bit. Those of a large one are
computed one after the other, each by all threads, and each tensor's gradient is added to the sum as soon as it is
computed, so that there is never another whole gradient.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["LARGE_MODEL", "GradientWorkers", "MicroResult", "one_core"]

T = TypeVar("T")
S = TypeVar("S")

LARGE_MODEL = 1 << 26
"""The parameters from which a model is large: threads within its operators hardly wait for each other, and a gradient
for each thread would take gigabytes."""
PENDING_BYTES = 1 << 28
"""The bytes of gradients that may wait for those of an earlier part; one of each thread may, whatever its size."""


@dataclass(frozen=True, eq=False)
class MicroResult(Generic[S]):
    """A micro-batch's loss (a scalar with a graph) and whatever it reports."""

    loss: Tensor
    report: S


class GradientWorkers:
    """Runs forward and backward of micro-batches, each on one thread that uses one core, or of a large model all cores.

    Threads within an operator wait for each other at every operator. This costs more than it saves for small models and
    is six times slower on a busy machine. Whole micro-batches in parallel do not wait.
    """

    def __init__(self, num_threads: int, *, is_large: bool = False) -> None:
        self.num_threads, self.is_large = num_threads, is_large
        # Even one thread is a separate one: the caller's may use several cores in an operator, with other bits.
        num_passes, num_cores = (1, num_threads) if is_large else (num_threads, 1)
        self._pool = ThreadPoolExecutor(num_passes, "agentgym-learner", torch.set_num_threads, (num_cores,))

    def accumulate(
        self,
        parts: Sequence[T],
        compute: Callable[[T], MicroResult[S]],
        parameters: Sequence[Tensor],
        sizes: Sequence[int] = (),
    ) -> list[S]:
        """Adds the gradient of every part's loss to `parameters`, in the order of the parts; returns their reports.

        With `sizes`, the gradients of that many parts are summed at a time, and then the sums.
        """
        if self.is_large:
            give_back_memory()
        reports: list[S] = []
        with closing(self._compute(parts, compute, parameters)) as futures:
            for size in sizes or (len(parts),):
                before = [parameter.grad for parameter in parameters]
                for parameter in parameters:
                    parameter.grad = None
                for future in islice(futures, size):
                    gradients, report = future.result()
                    _add(parameters, gradients)
                    del future, gradients  # before another part begins: either would keep the gradients
                    reports.append(report)
                _add(parameters, before)
        if self.is_large:
            give_back_memory()
        return reports

    def _compute(
        self, parts: Sequence[T], compute: Callable[[T], MicroResult[S]], parameters: Sequence[Tensor]
    ) -> Generator[Future[tuple[Sequence[Tensor | None], S]]]:
        """Yields the future gradients and report of each part; those of later parts are computed meanwhile.

        Of a large model, a part is computed as it is asked for, and adds its gradients itself.
        """

        def compute_part(part: T) -> tuple[Sequence[Tensor | None], S]:
            result = compute(part)
            if not self.is_large:
                return torch.autograd.grad(result.loss, parameters, allow_unused=True), result.report
            torch.autograd.backward(result.loss, inputs=parameters)
            return [None] * len(parameters), result.report

        num_bytes = sum(parameter.numel() * gradient_type(parameter).itemsize for parameter in parameters)
        max_pending = 1 if self.is_large else max(self.num_threads, PENDING_BYTES // max(1, num_bytes))
        rest, pending = iter(parts), deque[Future[tuple[Sequence[Tensor | None], S]]]()
        try:
            for _ in parts:
                few = islice(rest, max_pending - len(pending))
                pending.extend(self._pool.submit(compute_part, part) for part in few)
                yield pending.popleft()
        finally:
            for future in pending:
                future.cancel()

    def map(self, work: Callable[[T], S], parts: Iterable[T]) -> list[S]:
        """Runs `work` on every part; returns the results in their order."""
        return list(self._pool.map(work, parts))

    def run(self, work: Callable[[], S]) -> S:
        """Runs `work` on one of these threads and on one core, so that an optimizer's step has the same bits."""
        return self._pool.submit(partial(_run_on_one_core, work) if self.is_large else work).result()

    def close(self) -> None:
        """Stops the threads."""
        self._pool.shutdown()


def give_back_memory() -> None:
    """Returns freed memory to the system, of which the C library keeps some for each thread: gigabytes of a model's."""
    with suppress(OSError, AttributeError):  # a C library that has no such function
        ctypes.CDLL(None).malloc_trim(0)


def _add(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            # A fused optimizer reads a gradient as contiguous memory; one of a slice has gaps.
            parameter.grad = gradient.to(gradient_type(parameter)).contiguous()
        else:
            parameter.grad.add_(gradient)


def _run_on_one_core(work: Callable[[], S]) -> S:
    with one_core():
        return work()


@contextmanager
def one_core() -> Iterator[None]:
    """Has torch compute on one core in this thread, and in threads that begin to compute meanwhile.

    For work of many small operations. Threads within an operator wait for each other: on 16 cores of which servers kept
    one or two busy, each operation on a batch took 13 ms, and a batch of 64 rows 0.9 s.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gradient_type(parameter: Tensor) -> torch.dtype:
    """The type in which the gradients of a parameter's micro-batches are summed: float32 if it has a master."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return dtype or parameter.dtype
