"""Gradients of micro-batches on CPU threads, summed in a fixed order, so that the thread count never changes a bit."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["GradientWorkers", "MicroResult", "one_core"]

T = TypeVar("T")
S = TypeVar("S")

PENDING_BYTES = 1 << 28
"""The bytes of gradients that may wait for those of an earlier part; one of each thread may, whatever its size."""


@dataclass(frozen=True, eq=False)
class MicroResult(Generic[S]):
    """A micro-batch's loss (a scalar with a graph) and whatever it reports."""

    loss: Tensor
    report: S


class GradientWorkers:
    """Runs forward and backward of micro-batches, each on one thread that uses one core.

    Threads within an operator wait for each other at every operator. This costs more than it saves for small models and
    is six times slower on a busy machine. Whole micro-batches in parallel do not wait.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        # Even one thread is a separate one: the caller's may use several cores in an operator, with other bits.
        self._pool = ThreadPoolExecutor(num_threads, "agentgym-learner", _one_core)

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
        reports: list[S] = []

        def compute_part(part: T) -> tuple[tuple[Tensor | None, ...], S]:
            result = compute(part)
            return torch.autograd.grad(result.loss, parameters, allow_unused=True), result.report

        num_bytes = sum(parameter.numel() * gradient_type(parameter).itemsize for parameter in parameters)
        max_pending, pending = max(self.num_threads, PENDING_BYTES // max(1, num_bytes)), deque[Future[Any]]()
        rest = iter(parts)
        try:
            for size in sizes or (len(parts),):
                before = [parameter.grad for parameter in parameters]
                for parameter in parameters:
                    parameter.grad = None
                for _ in range(size):
                    few = islice(rest, max_pending - len(pending))
                    pending.extend(self._pool.submit(compute_part, part) for part in few)
                    gradients, report = pending.popleft().result()
                    _add(parameters, gradients)
                    del gradients  # before the next ones are waited for
                    reports.append(report)
                _add(parameters, before)
        finally:
            for future in pending:
                future.cancel()
        if num_bytes > PENDING_BYTES:
            give_back_memory()
        return reports

    def map(self, work: Callable[[T], S], parts: Iterable[T]) -> list[S]:
        """Runs `work` on every part; returns the results in their order."""
        return list(self._pool.map(work, parts))

    def run(self, work: Callable[[], S]) -> S:
        """Runs `work` on one of these threads, so that an optimizer's step uses one core and has the same bits."""
        return self._pool.submit(work).result()

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


def _one_core() -> None:
    torch.set_num_threads(1)


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
