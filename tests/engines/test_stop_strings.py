"""A stop string ends a reply at the id that completes it, wherever ids and characters are split."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentgym
from agentgym.chat_templates import renderer_for
from agentgym.embedded import embedded_folder
from agentgym.engines.openai.config import ChatEndpointConfig
from agentgym.engines.protocol import Completion, Sampling
from agentgym.engines.servers.http import SERVER_SECRET
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.sglang.engine import open_sglang
from agentgym.engines.stop_strings import ends_with_stop, find_stop, may_end_stop, stop_strings
from agentgym.engines.vllm.engine import open_vllm
from agentgym.errors import ConfigError
from agentgym.evaluation.play.endpoint import endpoint_loop
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.rollout import Episode, EpisodeWriter, Limits, RolloutLoop, Sampler, SamplingConfig
from agentgym.rollout.episode.episode_loop import EpisodeLoop
from agentgym.trajectory import Trajectory
from agentgym.types import Message, Task

PIECES = [bytes([byte]) for byte in range(256)] + [b"</", b"answer>", b"> and", b"\xe2\x82", "é".encode(), b"ab", b"ba"]


def decode(ids: Sequence[int]) -> str:
    return b"".join(PIECES[index] for index in ids).decode(errors="replace")


def ids_of(*pieces: str | bytes) -> list[int]:
    return [PIECES.index(piece.encode() if isinstance(piece, str) else piece) for piece in pieces]


def test_the_first_completed_stop_string_counts_with_the_id_that_completes_it() -> None:
    ids = ids_of("x", "</", "answer>", "y", "ab", "</")
    assert find_stop(ids, ["</answer>"], decode) == (3, "</answer>")
    assert find_stop(ids, ["ab", "</answer>"], decode) == (3, "</answer>")
    assert find_stop(ids, ["nswer>y", "</answer"], decode) == (3, "</answer")
    assert find_stop(ids, ["zz"], decode) is None
    assert find_stop(ids_of("<", "/", "a"), ["</a", "/"], decode) == (2, "/")


def test_a_character_of_several_ids_counts_when_its_last_byte_is_there() -> None:
    ids = [*ids_of(b"\xe2\x82"), 0xAC, *ids_of("x")]
    assert find_stop(ids, ["€"], decode) == (2, "€")
    assert not ends_with_stop(ids[:1], ["€"], decode)
    assert ends_with_stop(ids[:2], ["€"], decode)


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
    st.lists(st.text("ab<é€", min_size=1, max_size=4), max_size=3),
)
def test_looking_at_every_id_finds_what_looking_at_the_whole_finds(ids: list[int], stop: list[str]) -> None:
    ends = [number for number in range(1, len(ids) + 1) if stop and ends_with_stop(ids[:number], stop, decode)]
    match = find_stop(ids, stop, decode)
    assert ends[:1] == ([] if match is None else [match[0]])
    assert all(may_end_stop(ids[number - 1], stop, decode) for number in ends[:1])
    if match is not None:
        assert match[1] in decode(ids[: match[0]])
        assert not any(part in decode(ids[: match[0] - 1]) for part in stop)


def test_a_stop_id_at_the_end_is_no_text() -> None:
    settings = Sampling(max_tokens=9, stop_ids=(2,), stop=("\x02", "a"), decode=decode)
    assert settings.find_stop([5, 2]) is None
    assert settings.find_stop([*ids_of("a"), 5]) == (1, "a")
    assert Sampling(max_tokens=9, stop=("a",)).find_stop(ids_of("a")) is None


def test_one_text_is_a_list_of_one_and_an_empty_one_is_refused() -> None:
    assert Sampling(max_tokens=1, stop="</answer>").stop == ("</answer>",)  # type: ignore[arg-type]
    assert stop_strings(["a", "b"]) == ("a", "b") and stop_strings(None) == ()
    with pytest.raises(ConfigError, match="not empty"):
        stop_strings(["a", ""])


@pytest.fixture(params=["sglang", "vllm"])
def server(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The name and URL of a real server."""
    return request.param, request.getfixturevalue(f"{request.param}_server").url


@pytest.mark.engine
def test_a_server_stops_where_the_engine_of_this_process_does(server: tuple[str, str], tmp_path: Path) -> None:
    name, url = server
    renderer = renderer_for(embedded_folder())
    sampling = SamplingConfig(temperature=0.0, stop=('"dir', "never"))
    prompt = renderer.render([Message("user", "Hello")])
    reply_sampling = sampling.for_reply(40, seed=0, renderer=renderer)

    async def play(loop: EpisodeLoop) -> Trajectory:
        sampler = Sampler(loop)
        try:
            return await sampler.play(Episode(Task("TextGame-v0", 3)))
        finally:
            sampler.close()

    async def run() -> tuple[Completion, Trajectory, Trajectory]:
        if name == "sglang":
            engine = await open_sglang(ServerConfig(urls=(url,)), embedded_folder())
        else:
            engine = await open_vllm(ServerConfig(urls=(url,)), embedded_folder())
        limits = Limits(max_turns=3)
        loops: list[EpisodeLoop] = [RolloutLoop(engine, renderer, limits, sampling)]
        chat = ChatEndpointConfig(api_key_env=SERVER_SECRET)
        loops.append(await endpoint_loop(f"{url}/v1", chat, limits, sampling))
        try:
            return (
                await engine.generate(prompt, reply_sampling, session="a"),
                await play(loops[0]),
                await play(loops[1]),
            )
        finally:
            await asyncio.gather(*(loop.close() for loop in loops))

    reply, own, chatted = asyncio.run(run())
    with agentgym.create_engine() as engine:
        (local,) = engine.generate("Hello", temperature=0.0, stop=('"dir', "never"), max_tokens=40)
    assert (reply.ids, reply.finish_reason) == (local.ids, "stop")
    for place, trajectory in enumerate((own, chatted)):
        assert trajectory.turns[0].stop == '"dir', place
        with EpisodeWriter(tmp_path) as writer:
            writer.write([trajectory], phase="eval", step=place)
    assert verify_run(tmp_path, renderer).ok
