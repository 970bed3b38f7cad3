"""A checkpoint is whole or refused by name; it is written aside, bit for bit that of its step; and old ones go."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError, RunFolderError
from agentgym.model.decoder import Decoder
from agentgym.model.model_folder import load_decoder, published_views, reading
from agentgym.rollout.record.manifest import write_manifest
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.checkpoints.checkpoint import (
    Checkpoint,
    LocalContent,
    Snapshot,
    checkpoint_folders,
    newest_whole,
)
from agentgym.trainers.checkpoints.random_states import random_states, seed_random, set_random_states
from agentgym.trainers.checkpoints.sharded_state import load_state, save_state
from agentgym.trainers.checkpoints.state_copy import CopyMemory
from agentgym.trainers.checkpoints.writer import Checkpoints, best_step
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.settings.critic import CriticConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

Tiny = Callable[..., Decoder]
Fresh = Callable[..., TrainingBatch]


@dataclass(frozen=True, kw_only=True, eq=False)
class Held(Snapshot):
    """Is written when it is allowed to, and notes how many are at once."""

    go: threading.Event
    begun: threading.Event = field(default_factory=threading.Event)

    def write(self, folder: Path) -> None:
        self.begun.set()
        assert self.go.wait(60)
        super().write(folder)


@dataclass(frozen=True, kw_only=True, eq=False)
class Unwritable(Snapshot):
    """The disk is full when half of it is written."""

    def write(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")


def snapshot(model: Decoder, step: int, kind: type[Snapshot] = Snapshot, **more: object) -> Snapshot:
    learner = {"optimizer": {"num_steps": step, "state": {0: {"mean": torch.full((3,), float(step))}}}}
    content = LocalContent.of(model, published_views(model), learner, CopyMemory())
    contents = Snapshot(step=step, content=content, tokenizer=embedded_folder(), tasks={"seen": step}, random={})
    return kind(**vars(contents), **more)


def write(run: Path, model: Decoder, steps: Sequence[int], config: CheckpointConfig | None = None) -> list[str]:
    """Writes the checkpoints of the steps, and names those that stay."""
    checkpoints = Checkpoints(run, config or CheckpointConfig())
    for step in steps:
        checkpoints.save(snapshot(model, step), [])
    checkpoints.wait()
    checkpoints.close()
    return [folder.name for folder in checkpoint_folders(run)]


FILES = [
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "state.json",
    "learner/structure.json",
    "learner/.metadata",
    "learner/__0_0.distcp",
    "manifest.json",
]


def truncated(file: Path, other_file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def missing(file: Path, other_file: Path) -> None:
    file.unlink()


def with_one_bit_changed(file: Path, other_file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def of_another_checkpoint(file: Path, other_file: Path) -> None:
    shutil.copyfile(other_file, file)


def test_the_files_of_a_checkpoint_are_those_that_are_tampered_with_below(tiny: Tiny, tmp_path: Path) -> None:
    write(tmp_path, tiny(), [20])
    folder = tmp_path / "checkpoints" / "step-000020"
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) == sorted(FILES)


@pytest.mark.parametrize("harm", [truncated, missing, with_one_bit_changed, of_another_checkpoint])
@pytest.mark.parametrize("name", FILES)
def test_a_torn_file_is_named_and_the_checkpoint_before_is_taken(
    name: str,
    harm: Callable[[Path, Path], None],
    tiny: Tiny,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(tmp_path, tiny(seed=1), [20])
    write(tmp_path, tiny(seed=2), [40])
    older, newer = checkpoint_folders(tmp_path)
    if harm is of_another_checkpoint and (older / name).read_bytes() == (newer / name).read_bytes():
        assert name not in ("model.safetensors", "state.json", "learner/__0_0.distcp", "manifest.json")
        return  # the same bytes in both: nothing was harmed
    harm(newer / name, older / name)
    with pytest.raises(RunFolderError) as refused:
        Checkpoint(newer)
    foreign = harm is of_another_checkpoint and name == "manifest.json"  # then each file is of another checkpoint
    assert str(newer) in str(refused.value) and ("other bytes" if foreign else name) in str(refused.value)
    checkpoint = newest_whole(tmp_path)
    assert checkpoint is not None and checkpoint.step == 20 and checkpoint.tasks == {"seen": 20}
    assert [record.getMessage() for record in caplog.records] == [f"{refused.value}. The one before is taken, step 20"]
    harm(older / name, newer / name)
    if harm is not of_another_checkpoint:
        with pytest.raises(RunFolderError, match=r"No checkpoint of the run is whole: .*delete .*checkpoints"):
            newest_whole(tmp_path)


def test_a_resumed_run_sets_torn_checkpoints_aside_and_repeats_their_steps(tiny: Tiny, tmp_path: Path) -> None:
    write(tmp_path, tiny(), [20, 40])
    truncated(tmp_path / "checkpoints" / "step-000040" / "state.json", tmp_path)
    (tmp_path / "checkpoints" / ".step-000060.part").mkdir()
    (tmp_path / "checkpoints" / "best").write_text("step-000040\n")
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoint = checkpoints.resume()
    assert checkpoint is not None and checkpoint.step == 20 and checkpoints.holds(20)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-000020", "torn-step-000040"}
    assert write(tmp_path, tiny(), [40]) == ["step-000020", "step-000040"]
    assert Checkpoint(tmp_path / "checkpoints" / "step-000040").step == 40


def test_a_run_without_checkpoints_begins_at_the_beginning(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, CheckpointConfig()).resume() is None


def test_an_update_waits_until_the_tensors_that_it_changes_are_written(tiny: Tiny, tmp_path: Path) -> None:
    model, go = tiny(), threading.Event()
    mean = torch.ones(3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    asyncio.run(checkpoints.before_update())  # nothing is being written
    content = LocalContent.of(model, published_views(model), {"state": {0: mean, 1: [mean]}}, CopyMemory())
    contents = Snapshot(step=1, content=content, tokenizer=embedded_folder(), tasks={}, random={})
    snapshot_held = Held(**vars(contents), go=go)
    path = checkpoints.save(snapshot_held, [])
    assert snapshot_held.begun.wait(60)
    checkpoints.check()
    assert newest_whole(tmp_path) is None, "it is not there before it is whole"
    update = threading.Thread(target=lambda: asyncio.run(checkpoints.before_update()))
    update.start()
    update.join(0.05)
    assert update.is_alive()
    go.set()
    update.join(60)
    assert not update.is_alive()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
        mean.zero_()
    checkpoints.wait()
    written = Checkpoint(path)
    state = written.learner_state()
    assert torch.equal(state["state"][0], torch.ones(3)) and torch.equal(state["state"][1][0], torch.ones(3))
    loaded = load_decoder(path)
    assert all(torch.equal(left, right) for left, right in zip(loaded.parameters(), before, strict=True))
    checkpoints.close()


class FullDisk:
    """Content that cannot be written."""

    is_live = True

    def write(self, folder: Path) -> None:
        raise OSError(28, "No space left on device")


def test_an_update_goes_on_after_a_checkpoint_that_could_not_be_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(Snapshot(step=1, content=FullDisk(), tokenizer=embedded_folder(), tasks={}, random={}), [])
    asyncio.run(checkpoints.before_update())
    with pytest.raises(RunFolderError, match="No space left"):
        checkpoints.wait()
    checkpoints.close()


def test_a_checkpoint_waits_for_the_one_before(tiny: Tiny, tmp_path: Path) -> None:
    model, checkpoints = tiny(), Checkpoints(tmp_path, CheckpointConfig())
    first, second = (snapshot(model, step, Held, go=threading.Event()) for step in (1, 2))
    assert isinstance(first, Held) and isinstance(second, Held)
    checkpoints.save(first, [])
    second.go.set()
    with ThreadPoolExecutor(1) as aside:
        waiting = aside.submit(checkpoints.save, second, [])
        assert first.begun.wait(60) and not second.begun.is_set()
        first.go.set()
        waiting.result(60)
    checkpoints.wait()
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step-000001", "step-000002"]
    checkpoints.close()


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_one_before(
    background: bool, tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny()
    write(tmp_path, model, [1])
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(background=background))
    with pytest.raises(RunFolderError, match=r"No space left on device.*make room and go on with --resume"):
        checkpoints.save(snapshot(model, 2, Unwritable), [])
        while True:
            checkpoints.check()
    assert not checkpoints.holds(2)
    checkpoint = newest_whole(tmp_path)
    assert checkpoint is not None and checkpoint.step == 1
    checkpoints.save(snapshot(model, 3), [])
    checkpoints.close()
    assert not caplog.records, "what was raised is not told again"
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step-000001", "step-000003"]


def test_an_unraised_error_is_logged_at_the_end(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(snapshot(tiny(), 2, Unwritable), [])
    checkpoints.close()
    assert "No space left" in caplog.text


def test_the_last_ones_stay_and_the_best_and_what_is_being_read(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(every=1, keep=2))
    metrics = [{"step": step, "success": float(step == 2)} for step in range(1, 31)]

    def save(step: int) -> list[int]:
        checkpoints.save(snapshot(model, step), metrics[:step])
        checkpoints.wait()
        return [int(folder.name[5:]) for folder in checkpoint_folders(tmp_path)]

    assert save(1) == [1] and save(2) == [1, 2] and save(3) == [2, 3]
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-000002\n"
    assert save(4) == [2, 3, 4]
    with reading(tmp_path / "checkpoints" / "step-000003"):
        assert save(5) == [2, 3, 4, 5]
    assert save(6) == [2, 5, 6]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "best", "step-000002", "step-000005", "step-000006",
    }  # fmt: skip
    checkpoints.close()


def test_without_keep_all_stay_and_without_keep_best_none_is_named(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny()
    assert len(write(tmp_path / "all", model, range(1, 5))) == 4
    config = CheckpointConfig(keep=1, keep_best=None)
    assert write(tmp_path / "one", model, range(1, 4), config) == ["step-000003"]
    assert not (tmp_path / "one" / "checkpoints" / "best").exists()


def test_the_best_checkpoint_is_told_by_a_mean_over_a_window() -> None:
    metrics = [{"step": step, "success": value} for step, value in enumerate([0.0, 1.0, 1.0, 0.0, 1.0, None], start=1)]
    assert best_step([2, 3, 4], metrics, "success", 2) == 3
    assert best_step([2, 3, 4], metrics, "success", 1) == 3, "the later one of equals"
    assert best_step([1, 6], metrics, "success", 1) == 1, "a step that has no number does not count"
    assert best_step([1, 6], metrics, "reward", 1) is None
    assert best_step([], metrics, "success", 1) is None


def test_a_metric_that_no_step_has_is_warned_about_once_with_the_nearest_name(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_best="sucess"))
    for step in (1, 2):
        checkpoints.save(snapshot(tiny(), step), [{"step": 1, "success": 1.0}])
    checkpoints.close()
    (record,) = caplog.records
    assert "'sucess'" in record.getMessage() and "success" in record.getMessage()


@pytest.mark.parametrize("settings", [{"every": 0}, {"keep": -1}, {"keep_best": ""}])
def test_settings_that_make_no_sense_are_named(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint.{next(iter(settings))}"):
        CheckpointConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("trunk", ["none", "own", "shared"])
def test_a_learner_goes_on_from_a_file_as_if_nothing_had_been(
    trunk: str, name: str, tiny: Tiny, fresh_batch: Fresh, tmp_path: Path
) -> None:
    critic = CriticConfig(trunk=trunk)  # type: ignore[arg-type]
    config = LearnerConfig(critic=critic, threads=1, kl=KLConfig(coefficient=0.1, target=0.01, horizon=100))
    step = OptimizerConfig(name=name, learning_rate=1e-3, decay="linear")  # type: ignore[arg-type]
    model = tiny()
    learner = Learner(model, config, step, total_steps=4, reference=tiny())
    batch = fresh_batch(model)
    learner.update(batch)
    learner.update_critic(batch)
    save_state(learner.state_dict(), tmp_path / "learner")
    again = tiny()
    with torch.no_grad():
        for parameter, source in zip(again.parameters(), model.parameters(), strict=True):
            parameter.copy_(source)
    resumed = Learner(again, config, step, total_steps=4, reference=tiny())
    resumed.load_state_dict(load_state(tmp_path / "learner"))
    assert resumed.update(batch) == learner.update(batch)
    assert resumed.update_critic(batch) == learner.update_critic(batch)
    assert all(torch.equal(left, right) for left, right in zip(again.parameters(), model.parameters(), strict=True))
    for any_learner in (learner, resumed):
        any_learner.close()


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
tensors = st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(torch.tensor)
trees = st.recursive(
    leaves | tensors,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@given(state=st.dictionaries(st.text(), trees, max_size=3))
def test_any_tree_is_read_as_it_was_written(state: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("state")
    save_state(state, folder)
    assert same(load_state(folder), state) and same(CopyMemory().copy_tree(state), state)


def test_copies_take_the_memory_of_copies_that_nothing_refers_to_and_no_other() -> None:
    memory, state = CopyMemory(), {"a": torch.arange(6.0), "b": [torch.ones(3, dtype=torch.bfloat16).t(), 1]}
    first = memory.copy_tree(state)
    state["a"] += 1  # type: ignore[operator]
    place, second = first["a"].data_ptr(), memory.copy_tree(state)
    assert first["a"].tolist() == [0, 1, 2, 3, 4, 5] and second["a"].tolist() == [1, 2, 3, 4, 5, 6]
    tensor, place = second["b"][0], second["a"].data_ptr()
    del first, second
    third = memory.copy_tree(state)
    assert third["a"].data_ptr() != place and tensor.tolist() == [1, 1, 1]
    place = third["a"].data_ptr()
    del third
    assert memory.copy_tree(state)["a"].data_ptr() == place


def test_a_copy_has_a_storage_of_its_own_which_a_file_is_no_larger_for(tmp_path: Path) -> None:
    copies = CopyMemory().copy([torch.zeros(2, 3).t(), torch.zeros(100_000), torch.zeros(0, 4), torch.tensor(2.0)])
    assert [copy.untyped_storage().nbytes() for copy in copies] == [24, 400_000, 0, 4]
    assert [tuple(copy.shape) for copy in copies] == [(3, 2), (100_000,), (0, 4), ()]
    torch.save(copies[0], tmp_path / "small.pt")
    assert (tmp_path / "small.pt").stat().st_size < 2000


def test_a_tree_keeps_its_dtypes_its_numbered_keys_and_its_empty_parts(tmp_path: Path) -> None:
    state = {
        "parts": [{"state": {}, "groups": [{"lr": 0.1, "params": [0, 1]}]}],
        "a/b": {7: torch.tensor(3.0, dtype=torch.bfloat16), "7": torch.arange(3, dtype=torch.int64)},
        "a": {"b/7": torch.zeros(0, 4)},
    }
    save_state(state, tmp_path)
    assert same(load_state(tmp_path), state)


class Program:
    """A pickle that creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_checkpoint_with_a_program_as_metadata_is_refused_and_not_run(tiny: Tiny, tmp_path: Path) -> None:
    write(tmp_path, tiny(), [1])
    folder, mark = tmp_path / "checkpoints" / "step-000001", tmp_path / "ran"
    (folder / "learner" / ".metadata").write_bytes(pickle.dumps(Program(mark)))
    write_manifest(folder, {"step": 1})  # whoever replaces the file can replace its digest
    checkpoint = Checkpoint(folder)
    with pytest.raises(RunFolderError, match="which could run code"):
        checkpoint.learner_state()
    assert not mark.exists()


def test_metadata_that_is_something_else_or_cut_short_is_refused(tmp_path: Path) -> None:
    save_state({"mean": torch.ones(3)}, tmp_path)
    path = tmp_path / ".metadata"
    whole = path.read_bytes()
    for data in (pickle.dumps({"mean": 1}), whole[: len(whole) // 2], b""):
        path.write_bytes(data)
        with pytest.raises(RunFolderError, match="is not metadata of tensors"):
            load_state(tmp_path)


def test_random_numbers_go_on_where_they_stood() -> None:
    def drawn() -> list[object]:
        ours = [random.random(), random.gauss(), np.random.rand(), np.random.randn()]
        return [*ours, float(torch.rand(())), torch.randn(3).tolist()]

    before = random_states()
    random.gauss()
    np.random.randn()  # leaves half of a pair behind, as gauss does
    states = json.loads(json.dumps(random_states()))
    first = drawn()
    assert drawn() != first
    set_random_states(states)
    assert drawn() == first
    seed_random(3)
    seeded = drawn()
    seed_random(3)
    assert drawn() == seeded != first
    set_random_states(before)
