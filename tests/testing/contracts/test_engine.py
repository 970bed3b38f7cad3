"""`check_engine` finds the faults that would train on something wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from agentgym.engines.protocol import Completion, Sampling, WeightSync
from agentgym.engines.scripted import ScriptedEngine, ScriptedReply
from agentgym.errors import EngineError
from agentgym.model.published_weights import Weights
from agentgym.testing.contracts.engine import check_engine


class Careful(ScriptedEngine):
    """A scripted engine held to what the check asks of a real one: ids in range, `length` when no stop id came."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        if not all(0 <= index < self.vocab_size for index in prompt_ids):
            raise EngineError("an id is out of range")
        reply = await super().generate(prompt_ids, sampling, session=session)
        if reply.finish_reason == "stop" and reply.ids[-1] not in sampling.stop_ids:
            return replace(reply, finish_reason="length")
        return reply


def failed_checks(engine: ScriptedEngine, *, weights: Weights | None = None) -> set[str]:
    return {finding.check for finding in asyncio.run(check_engine(engine, weights=weights))}


def seeded(_session: str, prompt: Sequence[int], sampling: Sampling) -> list[int]:
    rng = random.Random(f"{sampling.seed} {list(prompt)}")
    return [rng.randrange(1, 50) for _ in range(sampling.max_tokens + 1)]


def test_an_engine_that_keeps_its_promises_has_no_findings() -> None:
    assert failed_checks(Careful(seeded, vocab_size=100, context_window=500), weights={}) == set()


def test_an_engine_that_ignores_the_seed_is_found_out() -> None:
    def same(_session: str, _prompt: Sequence[int], sampling: Sampling) -> list[int]:
        return list(range(1, sampling.max_tokens + 2))

    assert failed_checks(Careful(same, vocab_size=100, context_window=500)) == {"seeds"}


def test_an_engine_whose_draws_depend_on_earlier_requests_is_found_out() -> None:
    rng = random.Random(0)

    def running(_session: str, _prompt: Sequence[int], sampling: Sampling) -> list[int]:
        return [rng.randrange(1, 50) for _ in range(sampling.max_tokens + 1)]

    assert {"seeds", "batch invariance"} <= failed_checks(ScriptedEngine(running, vocab_size=100, context_window=500))


def test_logprobs_above_zero_and_faults_are_findings() -> None:
    def wrong(_session: str, _prompt: Sequence[int], sampling: Sampling) -> ScriptedReply:
        return ScriptedReply([4] * sampling.max_tokens, logprobs=[0.5] * sampling.max_tokens)

    assert "logprobs" in failed_checks(ScriptedEngine(wrong, vocab_size=100, context_window=500))
    broken = ScriptedEngine(lambda *_: ScriptedReply(fault="raise"), vocab_size=100, context_window=500)
    assert {"seeds", "max_tokens", "stop ids"} <= failed_checks(broken)


def test_an_update_that_does_not_show_in_the_versions_is_found_out() -> None:
    class Stale(Careful):
        async def update_weights(self, weights: Weights, version: int) -> WeightSync:
            return WeightSync(version=version)

    assert failed_checks(Stale(seeded, vocab_size=100, context_window=500), weights={}) == {"versions"}


def test_a_reply_without_its_stop_id_is_found_out() -> None:
    class Cut(Careful):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
            full = await super().generate(prompt_ids, sampling, session=session)
            if full.finish_reason != "stop":
                return full
            return Completion(full.ids[:-1], full.logprobs[:-1], full.policy_versions[:-1], "stop")

    assert failed_checks(Cut(seeded, vocab_size=100, context_window=500)) == {"stop ids"}


def test_an_engine_whose_aborts_last_is_found_out() -> None:
    class Aborting(Careful):
        def __init__(self) -> None:
            super().__init__(seeded, vocab_size=100, context_window=500)
            self.aborted: set[str] = set()

        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
            if session in self.aborted:
                return Completion((), (), (), "abort")
            return await super().generate(prompt_ids, sampling, session=session)

        async def abort(self, session: str) -> None:
            self.aborted.add(session)
            await super().abort(session)

    assert "stop ids" in failed_checks(Aborting())
