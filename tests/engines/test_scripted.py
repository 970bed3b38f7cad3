"""The scripted engine keeps the engine's contract, and fails exactly when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from agentgym.engines.protocol import Completion, Engine, Sampling
from agentgym.engines.scripted import Fault, LogNormalDelay, ScriptedEngine, ScriptedReply
from agentgym.errors import EngineError

END = 2
REPLY = (7, 8, 9, END)


def always(*ids: int, fault: Fault | None = None) -> ScriptedEngine:
    return ScriptedEngine(lambda session, prompt_ids, sampling: ScriptedReply(ids, fault=fault))


def ask(engine: ScriptedEngine, max_tokens: int = 10) -> Completion:
    return asyncio.run(engine.generate([1], Sampling(max_tokens=max_tokens, stop_ids=(END,)), session="a"))


def test_it_is_an_engine() -> None:
    assert isinstance(always(1), Engine)


def test_a_reply_is_cut_after_its_stop_id_and_at_max_tokens() -> None:
    assert ask(always(7, END, 8)) == Completion((7, END), (-0.25, -0.25), (0, 0), "stop")
    assert ask(always(*REPLY), max_tokens=2) == Completion((7, 8), (-0.25, -0.25), (0, 0), "length")
    assert ask(always(7)).finish_reason == "length"


def test_logprobs_are_those_of_the_script() -> None:
    engine = ScriptedEngine(lambda *_: ScriptedReply((7, END), logprobs=(-1.5, -0.5)))
    assert ask(engine).logprobs == (-1.5, -0.5)


def test_the_script_sees_session_prompt_and_seed() -> None:
    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        assert (session, list(prompt_ids), sampling.seed) == ("a", [1], 0)
        return (END,)

    assert ask(ScriptedEngine(reply)).ids == (END,)


@pytest.mark.parametrize("fault", ["raise", "lengths"])
def test_it_raises_on_demand(fault: Fault) -> None:
    with pytest.raises(EngineError):
        ask(always(*REPLY, fault=fault))


def test_an_aborted_reply_goes_on_where_it_stopped() -> None:
    async def play() -> tuple[Completion, Completion]:
        engine = always(*REPLY, fault="abort")
        sampling = Sampling(max_tokens=10, stop_ids=(END,))
        first = await engine.generate([1], sampling, session="a")
        await engine.update_weights({}, 3)
        return first, await engine.generate([1, *first.ids], sampling, session="a")

    first, rest = asyncio.run(play())
    assert (first.ids, first.finish_reason) == ((7, 8), "abort")
    assert (rest.ids, rest.finish_reason, rest.policy_versions) == ((9, END), "stop", (3, 3))


def test_a_hanging_request_ends_by_abort_and_leaves_no_session() -> None:
    async def play() -> Completion:
        engine = always(*REPLY, fault="hang")
        request = asyncio.ensure_future(engine.generate([1], Sampling(max_tokens=9), session="a"))
        await asyncio.sleep(0.01)
        assert not request.done()
        await engine.abort("a")
        completion = await request
        assert not engine.sessions
        return completion

    assert asyncio.run(play()) == Completion((), (), (), "abort")


def test_a_pause_holds_a_reply_at_a_token_and_the_new_version_begins_there() -> None:
    async def play() -> Completion:
        engine = ScriptedEngine(lambda *_: REPLY, token_s=0.01)
        request = asyncio.ensure_future(engine.generate([1], Sampling(max_tokens=9, stop_ids=(END,)), session="a"))
        await asyncio.sleep(0.025)
        await engine.pause()
        await asyncio.sleep(0.05)
        assert not request.done()
        await engine.update_weights({}, 1)
        await engine.resume()
        return await request

    completion = asyncio.run(play())
    assert completion.ids == REPLY
    assert completion.policy_versions[0] == 0
    assert completion.policy_versions[-1] == 1


@pytest.mark.parametrize("prompt", [[1] * 9, [1] * 100])
def test_a_request_over_the_window_is_refused(prompt: list[int]) -> None:
    engine = ScriptedEngine(lambda *_: REPLY, context_window=10)
    with pytest.raises(EngineError, match="context window of 10"):
        asyncio.run(engine.generate(prompt, Sampling(max_tokens=2), session="a"))


def test_a_closed_engine_refuses_and_versions_never_fall() -> None:
    engine = always(END)
    asyncio.run(engine.update_weights({}, 2))
    with pytest.raises(EngineError, match="never fall"):
        asyncio.run(engine.update_weights({}, 1))
    asyncio.run(engine.close())
    with pytest.raises(EngineError, match="closed"):
        ask(engine)


def test_log_normal_delays_are_seeded() -> None:
    first, again, seed_0 = LogNormalDelay(0.1, 1.0, seed=1), LogNormalDelay(0.1, 1.0, seed=1), LogNormalDelay(0.1, 1.0)
    drawn = [first() for _ in range(5)]
    assert drawn == [again() for _ in range(5)]
    assert drawn != [seed_0() for _ in range(5)]
    assert min(drawn) > 0
