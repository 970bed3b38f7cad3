"""`sglang.Engine` in the process that asks samples what the trainer computes, over updates and to its death."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from agentgym.embedded import embedded_folder
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.sglang.embedded import EmbeddedSglang
from agentgym.engines.sglang.engine import open_sglang
from agentgym.engines.weights.buckets import fused_digests, overall_digest
from agentgym.errors import ConfigError, RunFolderError
from agentgym.model.model_folder import save_model_folder

TOLERANCE = 1e-4
ROUNDING = 1e-3
"""Over hundreds of ids some are unlikely, and their logits large."""
WRONG = 1e-2
"""Far more than rounding: a policy that is not the one it is thought to be."""
MODULES = ["q_proj", "v_proj", "down_proj"]
MakeReference = Callable[..., Any]
LONG = 2.0
"""The temperature of long replies in `embedded_replies.py`."""


def adapt(model: Any, folder: Path) -> None:
    """Merges a random adapter into the model, and writes it to `folder` as PEFT does."""
    adapter = model.merge_adapter(MODULES, 2)
    folder.mkdir(exist_ok=True)
    save_file(adapter.tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config))


@pytest.fixture(scope="module")
def report(
    sglang_python: str, reference: MakeReference, told_by: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What `embedded_sglang.py` saw, which plays with the engine in SGLang's environment."""
    folder = tmp_path_factory.mktemp("embedded")
    for version in (0, 1):
        save_model_folder(reference(version).decoder, folder / str(version))
    adapt(reference(1), folder / "adapter")
    story: dict[str, Any] = told_by(
        sglang_python, "embedded_sglang.py", *(folder / name for name in ("0", "1", "adapter"))
    )
    return story


@pytest.mark.engine
def test_logprobs_are_the_trainers_at_every_temperature_before_and_after_an_update(
    report: dict[str, Any], reference: MakeReference
) -> None:
    models = reference(0), reference(1)
    assert len(report["replies"]) == 6
    for version, temperature, ids, logprobs, versions, checksum in report["replies"]:
        assert len(ids) == 20
        assert max(models[version].gaps(report["prompt"], ids, logprobs, temperature)) < TOLERANCE
        assert set(versions) == {version}
        assert checksum == overall_digest(fused_digests(models[version].tensors()))


@pytest.mark.engine
def test_an_aborted_reply_comes_back_with_what_was_sampled(report: dict[str, Any], reference: MakeReference) -> None:
    ids, logprobs, versions, reason = report["aborted"]
    assert (reason, set(versions)) == ("abort", {1})
    assert 0 < len(ids) < 700
    assert max(reference(1).gaps(report["prompt"], ids, logprobs, LONG)) < ROUNDING


@pytest.mark.engine
def test_ids_sampled_before_and_after_an_update_in_mid_flight_bear_their_versions(
    report: dict[str, Any], reference: MakeReference
) -> None:
    ids, logprobs, versions, reason = report["met"]
    switch = versions.index(2)
    assert reason == "abort"
    assert 0 < switch < len(ids) < 700
    assert versions == [1] * switch + [2] * (len(ids) - switch)
    old = reference(1).gaps(report["prompt"], ids, logprobs, LONG)
    new = reference(0).gaps(report["prompt"], ids, logprobs, LONG)
    assert max(old[:switch]) < ROUNDING
    assert max(new[switch:]) < ROUNDING
    assert min(max(old[switch:]), max(new[:switch])) > WRONG


@pytest.mark.engine
def test_a_reply_read_in_pieces_is_whole(report: dict[str, Any], reference: MakeReference) -> None:
    ids, logprobs, versions, reason = report["streamed"]
    assert (len(ids), versions, reason) == (20, [2] * 20, "length")
    assert max(reference(0).gaps(report["prompt"], ids, logprobs, 1.0)) < TOLERANCE


@pytest.mark.engine
def test_a_stop_id_ends_a_reply_and_a_pause_holds_one_back(report: dict[str, Any]) -> None:
    stop, ids, reason = report["stopped"]
    assert reason == "stop"
    assert ids.index(stop) == len(ids) - 1
    assert report["waited"]


@pytest.mark.engine
def test_weights_by_a_folder_and_an_adapter_alone_arrive(
    report: dict[str, Any], tmp_path: Path, reference: MakeReference
) -> None:
    model = reference(1)
    ids, logprobs, versions, _ = report["read"]
    assert (len(ids), set(versions)) == (20, {1})
    assert max(model.gaps(report["prompt"], ids, logprobs, LONG)) < TOLERANCE
    ids, logprobs, versions, _ = report["adapted"]
    assert (len(ids), set(versions)) == (20, {3})
    assert max(model.gaps(report["prompt"], ids, logprobs, LONG)) > WRONG
    adapt(model, tmp_path)
    assert max(model.gaps(report["prompt"], ids, logprobs, LONG)) < TOLERANCE


@pytest.mark.engine
def test_what_cannot_be_answered_is_refused_as_a_server_would(report: dict[str, Any]) -> None:
    messages = report["refused"]
    assert messages["path"].startswith("404 ")
    assert "no_such_field" in messages["field"]
    assert {messages[name][:4] for name in ("field", "empty", "update")} == {"400 "}
    assert "no answer within 0.3 s" in messages["late"]
    assert "close it first" in messages["second"]


@pytest.mark.engine
def test_an_engine_whose_scheduler_died_is_unreachable_and_the_program_lives_on(report: dict[str, Any]) -> None:
    assert len(report["killed"]) == 3
    assert all("no server is left" in message for message in report["killed"])


@pytest.mark.engine
def test_no_process_is_left_and_the_program_is_as_it_was(report: dict[str, Any]) -> None:
    assert report["left"] == report["left_after_death"] == []
    assert report["kept"]


def test_where_sglang_is_not_installed_its_server_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")  # set for good by the engine
    how = ServerConfig(embedded=True, device="cpu")
    with pytest.raises(ConfigError, match=r"SGLang cannot be imported here .*install it, or use its server"):
        asyncio.run(open_sglang(how, embedded_folder()))
    with pytest.raises(RunFolderError, match="no model in"):
        asyncio.run(open_sglang(how, tmp_path))
    with pytest.raises(ConfigError):  # the first did not stay
        asyncio.run(EmbeddedSglang(embedded_folder(), on_cpu=True, arguments={}).start())
