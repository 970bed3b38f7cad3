"""`check_engine`: tests an inference engine, by using it, for the promises on which the rollout relies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from agentgym.engines.protocol import Completion, Engine, Sampling
from agentgym.errors import EngineError
from agentgym.model.published_weights import Weights
from agentgym.testing.contracts.env import Finding

__all__ = ["Recompute", "check_engine"]

Recompute = Callable[[Sequence[int], Sequence[int], Sampling], Sequence[float]]
"""`(prompt_ids, reply_ids, sampling) -> logprobs` of the reply's ids, computed by the trainer's own forward pass."""
_TOLERANCE = 1e-4  # natural logarithm, fp32
_PATIENCE_S = 60.0
_HOT = 2.0
"""The temperature at which even a confident model replies differently for another seed."""


@dataclass(frozen=True)
class _Bench:
    engine: Engine
    prompts: Sequence[Sequence[int]]
    recompute: Recompute | None
    weights: Weights | None
    sampling: Sampling
    reproducible: bool

    async def reply(self, index: int, session: str, **changes: object) -> Completion:
        """Returns one reply to prompt `index` in a session of its own, which is then ended."""
        sampling = replace(self.sampling, **changes)  # type: ignore[arg-type]
        try:
            return await asyncio.wait_for(
                self.engine.generate(self.prompts[index], sampling, session=session), _PATIENCE_S
            )
        finally:
            await self.engine.abort(session)


async def check_engine(
    engine: Engine,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    recompute: Recompute | None = None,
    weights: Weights | None = None,
    max_tokens: int = 12,
    reproducible: bool = True,
) -> list[Finding]:
    """Returns everything found wrong with an engine; [] if it is fine. The engine stays open.

    `prompts` are at least two prompts of token ids (default: random ids, with a common prefix). With `recompute` the
    logprobs are compared with those of the trainer. With `weights` (what `update_weights` takes; `{}` for an engine
    that shares them) an update to the next version is made. Replies that a batch changes are warnings, all else errors.
    `reproducible=False` is for an engine that does not promise equal ids for equal seeds, such as a server: then only
    different seeds must differ.
    """
    rng = random.Random(0)
    common = [rng.randrange(engine.vocab_size) for _ in range(20)]
    drawn = [common + [rng.randrange(engine.vocab_size) for _ in range(5 + 7 * i)] for i in range(4)]
    sampling = Sampling(max_tokens=max_tokens, seed=1)
    bench = _Bench(engine, prompts or drawn, recompute, weights, sampling, reproducible)
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        if name == "batch invariance" and not reproducible:
            continue
        severity = "warning" if name == "batch invariance" else "error"
        try:
            findings += [Finding(name, message, severity) async for message in check(bench)]  # type: ignore[arg-type]
        except (EngineError, TimeoutError) as error:
            findings.append(Finding(name, f"raised {type(error).__name__}: {error}"))
    return findings


async def _seeds(bench: _Bench) -> AsyncIterator[str]:
    first, again = await bench.reply(0, "a"), await bench.reply(0, "b")
    if bench.reproducible and first.ids != again.ids:
        yield "the same prompt, sampling and seed gave other ids; make every draw depend on the request's seed alone"
    others = {(await bench.reply(0, f"c{seed}", seed=seed, temperature=_HOT)).ids for seed in range(1, 8)}
    if len(others) == 1:
        yield "seven seeds gave the same ids; pass Sampling.seed on, or the members of a group are copies"


async def _lengths(bench: _Bench) -> AsyncIterator[str]:
    for max_tokens in (1, 2, 7):
        reply = await bench.reply(0, "a", max_tokens=max_tokens)
        if len(reply.ids) != max_tokens or reply.finish_reason != "length":
            yield f"max_tokens {max_tokens} without stop ids gave {len(reply.ids)} ids, finish {reply.finish_reason!r}"


async def _window(bench: _Bench) -> AsyncIterator[str]:
    window = bench.engine.context_window
    for max_tokens in (1, 4):
        prompt, sampling = [0] * (window - max_tokens), replace(bench.sampling, max_tokens=max_tokens)
        try:
            reply = await asyncio.wait_for(bench.engine.generate(prompt, sampling, session="full"), _PATIENCE_S)
        except EngineError as error:
            yield f"a prompt of {len(prompt)} ids with max_tokens {max_tokens} fills the context_window: {error}"
            continue
        finally:
            await bench.engine.abort("full")
        if len(reply.ids) != max_tokens:
            yield f"a reply that fills the context_window has {len(reply.ids)} of {max_tokens} ids"


async def _stops(bench: _Bench) -> AsyncIterator[str]:
    free = await bench.reply(0, "a")
    if not free.ids:
        yield f"a request got no id, finish {free.finish_reason!r}; abort ends the running requests of a session alone"
        return
    stop = free.ids[len(free.ids) // 2]
    want = free.ids[: free.ids.index(stop) + 1]
    reply = await bench.reply(0, "b", stop_ids=(stop,))
    if reply.finish_reason != "stop" and (bench.reproducible or stop in reply.ids):
        yield f"a sampled stop id did not end the reply: finish {reply.finish_reason!r}"
    elif stop in reply.ids[:-1] or (reply.finish_reason == "stop" and reply.ids[-1] != stop):
        yield f"the reply {reply.ids} does not end with its first stop id {stop}"
    elif bench.reproducible and reply.ids != want:
        yield f"the reply ended as {reply.ids}, want {want}: up to the stop id, which is included"


async def _logprobs(bench: _Bench) -> AsyncIterator[str]:
    settings: list[dict[str, object]] = [{}, {"temperature": 0.6}, {"temperature": 1.3}, {"temperature": 0.0}]
    for changes in settings:
        reply = await bench.reply(1, "a", **changes)
        if not all(value <= 1e-6 for value in reply.logprobs):
            yield f"logprobs above 0 at {changes}"
        if bench.recompute is None:
            continue
        want = bench.recompute(bench.prompts[1], reply.ids, replace(bench.sampling, **changes))  # type: ignore[arg-type]
        worst = max(abs(a - b) for a, b in zip(reply.logprobs, want, strict=True))
        if not worst <= _TOLERANCE:
            yield f"logprobs at {changes or 'temperature 1'} differ from the trainer's by up to {worst:.2g}"


async def _refusals(bench: _Bench) -> AsyncIterator[str]:
    engine, window = bench.engine, bench.engine.context_window
    long = [0] * (window - bench.sampling.max_tokens + 1)
    for what, prompt in {"id -1": [1, -1], "id vocab_size": [engine.vocab_size], "over the window": long}.items():
        try:
            await asyncio.wait_for(engine.generate(prompt, bench.sampling, session="bad"), _PATIENCE_S)
        except EngineError:
            continue
        finally:
            await engine.abort("bad")
        yield f"a prompt with {what} was accepted; raise EngineError before it reaches the model"


async def _abort(bench: _Bench) -> AsyncIterator[str]:
    await bench.engine.abort("never seen")
    await bench.engine.pause()
    task = asyncio.create_task(bench.engine.generate(bench.prompts[0], bench.sampling, session="a"))
    await asyncio.sleep(0.05)
    if task.done():
        yield "a reply came back while the engine was paused"
    await bench.engine.abort("a")
    done, _ = await asyncio.wait({task}, timeout=_PATIENCE_S)
    await bench.engine.resume()
    if not done:
        task.cancel()
        yield "abort did not end the session's request"
    elif (reason := (await task).finish_reason) != "abort":
        yield f"an aborted request finished as {reason!r}"


async def _pause(bench: _Bench) -> AsyncIterator[str]:
    free = await bench.reply(0, "a")
    await bench.engine.pause()
    task = asyncio.create_task(bench.reply(0, "b"))
    await asyncio.sleep(0.05)
    if task.done():
        yield "a reply came back while the engine was paused"
    await bench.engine.resume()
    if (await task).ids != free.ids and bench.reproducible:
        yield "a pause changed the reply"


async def _batch(bench: _Bench) -> AsyncIterator[str]:
    indices = [index % len(bench.prompts) for index in range(16)]
    alone = [await bench.reply(index, "alone", seed=seed) for seed, index in enumerate(indices)]
    together = await asyncio.gather(*(bench.reply(index, f"t{s}", seed=s) for s, index in enumerate(indices)))
    if [reply.ids for reply in alone] != [reply.ids for reply in together]:
        yield "replies change with what else is in flight: equal seeds do not repeat a run"
    elif [reply.logprobs for reply in alone] != [reply.logprobs for reply in together]:
        yield "logprobs change in their last bits with what else is in flight"


async def _versions(bench: _Bench) -> AsyncIterator[str]:
    if bench.weights is None:
        return
    before = max((await bench.reply(0, "a")).policy_versions)
    await bench.engine.pause()
    await bench.engine.update_weights(bench.weights, before + 1)
    await bench.engine.resume()
    after = set((await bench.reply(0, "b")).policy_versions)
    if after != {before + 1}:
        yield f"after update_weights to version {before + 1} the reply's ids bear {sorted(after)}"


CHECKS: dict[str, Callable[[_Bench], AsyncIterator[str]]] = {
    "seeds": _seeds,
    "max_tokens": _lengths,
    "window": _window,
    "stop ids": _stops,
    "logprobs": _logprobs,
    "refusals": _refusals,
    "abort": _abort,
    "pause": _pause,
    "batch invariance": _batch,
    "versions": _versions,
}
