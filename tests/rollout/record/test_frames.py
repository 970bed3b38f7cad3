"""A compressed file of episodes reads, grows, is cut and survives a kill as the plain one does."""

from __future__ import annotations

import io
import threading
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from agentgym.errors import RunFolderError
from agentgym.rollout.record import frames, line_reader
from agentgym.rollout.record.chain import PackedFile
from agentgym.rollout.record.episodes_file import EpisodeWriter, read_episodes
from agentgym.rollout.record.line_reader import DAMAGED, FILE_NAME, PACKED_NAME, LineReader, find_episodes
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task


def played(member: int, num_tokens: int = 3) -> Trajectory:
    ids = tuple(range(num_tokens))
    reply = TokenSpan(ids, Source.POLICY, tuple(-number / 8 for number in ids), (0,) * num_tokens)
    row = Row((TokenSpan((1, 2), Source.PROMPT), reply), (Message("user", "Look."),))
    turn = Turn(Message("assistant", f"{member}"), 0.5)
    return Trajectory(Task("X-v0", 1), "0", member, (row,), (turn,), Status.COMPLETED, StopReason.TERMINATED)


def write_steps(folder: Path, steps: range, *, compress: bool = True) -> bytes:
    folder.mkdir(exist_ok=True)
    with EpisodeWriter(folder, compress=compress) as writer:
        for step in steps:
            writer.write([played(member) for member in range(3)], step=step)
    path = find_episodes(folder)
    assert path is not None
    return path.read_bytes()


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame for every two lines."""
    monkeypatch.setattr(frames, "FRAME_BYTES", 900)


@pytest.mark.usefixtures("small_frames")
def test_it_holds_the_lines_of_the_plain_file_for_every_reader_of_zstd(tmp_path: Path) -> None:
    plain = write_steps(tmp_path / "plain", range(4), compress=False)
    packed = write_steps(tmp_path / "packed", range(4))
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed), read_across_frames=True) as reader:
        assert reader.read() == plain
    with (tmp_path / "packed" / PACKED_NAME).open("rb") as file:
        all_frames = list(frames.read_frames(file, len(packed)))
    assert len(all_frames) == 8 and sum(frame.num_lines for frame in all_frames) == 12
    assert [*read_episodes(tmp_path / "packed" / FILE_NAME)] == [*read_episodes(tmp_path / "plain")]


@pytest.mark.usefixtures("small_frames")
@pytest.mark.parametrize("name", [FILE_NAME, PACKED_NAME])
def test_a_line_is_read_by_its_offset_in_the_plain_text(tmp_path: Path, name: str) -> None:
    write_steps(tmp_path, range(3), compress=name == PACKED_NAME)
    with LineReader(tmp_path / name) as reader:
        lines = [*reader]
        offsets = [sum(map(len, lines[:number])) for number in range(len(lines))]
        for number in (8, 0, 4, 5, 3):
            assert reader.line_at(offsets[number]) == lines[number]


@pytest.mark.long
@pytest.mark.usefixtures("small_frames")
def test_a_file_torn_at_any_byte_reads_whole_frames_and_grows_to_the_same_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, whole = (write_steps(tmp_path / str(number), range(number)) for number in (1, 2))
    path = tmp_path / "1" / PACKED_NAME
    for size in range(len(first), len(whole)):
        path.write_bytes(whole[:size])
        records = [record for record in read_episodes(path) if record.step == 0]
        assert len(records) == 3
        if size > len(first):
            assert "is torn" in caplog.text or len([*read_episodes(path)]) == 5
        with EpisodeWriter(tmp_path / "1", compress=True) as writer:
            writer.rewind(0)
            writer.write([played(member) for member in range(3)], step=1)
        assert path.read_bytes() == whole
    path.write_bytes(first + bytes(500))  # a power cut: the file grew, its contents did not arrive
    assert write_steps(tmp_path / "1", range(1, 2)) == whole


def test_a_run_that_is_resumed_keeps_the_form_of_its_file(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1), compress=False)
    write_steps(tmp_path, range(1, 2))
    assert (
        not (tmp_path / PACKED_NAME).exists()
        and [record.step for record in read_episodes(tmp_path)] == [0] * 3 + [1] * 3
    )
    (tmp_path / PACKED_NAME).touch()
    with pytest.raises(RunFolderError, match=r"episodes.jsonl and episodes.jsonl.zst: remove"):
        EpisodeWriter(tmp_path)


@pytest.mark.usefixtures("small_frames")
def test_damage_is_named_and_nothing_is_cut_off(tmp_path: Path) -> None:
    whole = write_steps(tmp_path, range(3))
    path = tmp_path / PACKED_NAME
    with path.open("rb") as file:
        second = list(frames.read_frames(file, len(whole)))[1]
    for place in (second.offset, second.offset + 3, second.offset + 13, second.end - 20):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :])
        with pytest.raises(RunFolderError, match="line 3 is not an episode"):
            list(read_episodes(tmp_path))
        if place < second.end - 20:
            with pytest.raises(RunFolderError, match=f"damaged at byte {second.offset}"):
                PackedFile(path)
        assert len(path.read_bytes()) == len(whole)


@pytest.mark.long
def test_a_reader_goes_on_while_a_run_writes(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, compress=True) as writer:
        writer.write([played(0, 5_000)])
        done = threading.Event()

        def write() -> None:
            for step in range(1, 30):
                writer.write([played(member, 5_000) for member in range(4)], step=step)
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        counts = []
        while not done.is_set() or not counts:
            counts.append(sum(1 for _ in read_episodes(tmp_path)))
        thread.join()
    assert counts == sorted(counts) and len([*read_episodes(tmp_path)]) == 1 + 29 * 4


def test_without_tokens_an_episode_keeps_its_messages_rewards_and_numbers(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, tokens=False) as writer:
        writer.write([played(7)], advantages=[[[0.5] * 3]])
    (record,) = read_episodes(tmp_path)
    episode = record.trajectory
    assert (episode.has_ids, episode.reward, record.advantages) == (False, 0.5, None)
    assert episode.metrics["prompt_tokens"] == 2 and episode.metrics["completion_tokens"] == 3
    assert episode.info["ids_left_out"] == {"opening": [{"role": "user", "content": "Look."}]}


def packed_as(text: bytes, num_bytes: int, num_lines: int) -> bytes:
    """A frame of `text` whose index entry has a right checksum of any sizes."""
    packed = zstandard.ZstdCompressor().compress(text)
    sizes = len(packed), num_bytes, num_lines
    return frames._ENTRY.pack(*frames._HEAD, *sizes, frames._checksum(*sizes)) + packed


@pytest.mark.parametrize(
    "content",
    [
        packed_as(b"", 0, 200_000_000),
        packed_as(b"{}\n", 3 << 30, 200_000_000),
        packed_as(b"{}\n", 3, 4),
        packed_as(b"\0" * (64 << 20), 10, 1),
    ],
    ids=["lines without bytes", "bytes that none holds", "more lines than bytes", "more bytes than indexed"],
)
def test_sizes_that_no_writer_gives_take_no_memory(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / PACKED_NAME
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with LineReader(path) as reader:
            assert [*reader] == [DAMAGED]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_line_longer_than_any_episode_is_damaged_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_reader, "MAX_BYTES", 100)
    monkeypatch.setattr(line_reader, "FRAME_BYTES", 30)
    path = tmp_path / FILE_NAME
    path.write_bytes(b"{}\n" + b"x" * 150 + b"\n" + b"[]\n" + b"y" * 150)
    with LineReader(path) as reader:
        assert [*reader] == [b"{}\n", DAMAGED, b"[]\n", DAMAGED]
