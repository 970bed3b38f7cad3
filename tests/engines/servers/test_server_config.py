"""Servers of every kind have one block of settings, and former names of it are read or lead to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from agentgym.cli.main import main
from agentgym.engines.servers import server_process
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.server_process import ServerCommand, ServerProcess, free_port, start_together
from agentgym.engines.servers.serving_settings import ServingSettings
from agentgym.errors import ConfigError, EngineError
from agentgym.settings.config_class import config_from_mapping
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.former_settings import with_current_names
from agentgym.trainers.settings.cluster import ClusterConfig

BOTH = {"sglang": {"urls": ["http://a:1"]}, "vllm": {"replicas": 2, "serving": {"sleep": True}}}


def test_words_for_a_server_are_arguments_of_an_embedded_engine() -> None:
    words = ("--max-model-len", "4096", "--enforce-eager", "--no-enable-chunked-prefill", "--dtype=float32")
    config = ServerConfig(embedded=True, server_args=words)
    assert config.arguments == {
        "max_model_len": 4096,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "dtype": "float32",
    }
    with pytest.raises(ConfigError, match="--NAME VALUE words, got '4096'"):
        ServerConfig(server_args=("4096",)).arguments  # noqa: B018
    for others in ({"urls": ("http://a:1",)}, {"python": "python3"}, {"replicas": 2}):
        with pytest.raises(ConfigError, match="leave urls, python and replicas out"):
            ServerConfig(embedded=True, **others)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_words_for_a_server_are_given_in_quotation_marks(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    train, option = ["train", "--env", "TextGame-v0", "--engine", kind, "--print-config"], "--server.server-args"
    assert main([*train, option, "--tp-size 2 --seed=3", "--steps", "4"]) == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert settings["server"]["server_args"] == ["--tp-size", "2", "--seed=3"]
    assert settings["steps"] == 4
    assert main([*train, option, "--tp-size", "2"]) == 2
    assert f"in quotation marks: {option} '--tp-size ...'" in capsys.readouterr().err
    words = ("--speculative-config", '{"method": "ngram"}', '--override={"a": 1}')
    assert ServerConfig(server_args=words).server_args == words


def test_what_no_server_can_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="replicas must be at least 1, got 0"):
        ServerConfig(replicas=0)
    with pytest.raises(ConfigError, match="the URL of a server begins with http://, got 'localhost:8000'"):
        ServerConfig(urls=("localhost:8000",))
    with pytest.raises(ConfigError, match="'http://a:1' is given twice"):
        ServerConfig(urls=("http://a:1", "http://a:1/"))


def test_the_help_lists_what_a_setting_is_for_each_kind_of_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--help-all"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    for help_text in (
        "Running servers, such as http://127.0.0.1:30000; none launches new ones. Each request sends the variable",
        "vLLM needs VLLM_SERVER_DEV_MODE=1, --enable-scale-out",
        "The interpreter that has the server's library (SGLang 0.5.23, vLLM 0.32, or later)",
        "all in one pair of quotation marks: of `sglang.launch_server` or `vllm.entrypoints.openai.api_server`",
    ):
        assert output.count(help_text) == 1, help_text


@pytest.mark.parametrize(
    ("engine", "server", "lines"),
    [
        ("sglang", ServerConfig(urls=("http://a:1",)), ("sglang.* are called server.* now", "vllm.* are left out")),
        (
            "vllm",
            ServerConfig(replicas=2, serving=ServingSettings(sleep=True)),
            ("sglang.* are left out", "vllm.* are"),
        ),
        ("local", ServerConfig(urls=("http://a:1",)), ("sglang.* are called server.* now", "vllm.* are left out")),
    ],
)
def test_a_block_for_each_kind_is_read_as_that_of_the_engine(
    engine: str, server: ServerConfig, lines: Sequence[str]
) -> None:
    notes: list[str] = []
    settings = with_current_names({"env": "TextGame-v0", "engine": engine, **BOTH}, notes.append)
    assert config_from_mapping(TrainConfig, settings).server == server
    assert len(notes) == len(lines) and all(line in note for line, note in zip(lines, notes, strict=True))


def test_a_run_of_an_earlier_version_is_read_without_a_word() -> None:
    notes: list[str] = []
    block = json.loads(json.dumps(asdict(ServerConfig())))
    settings = with_current_names({"env": "TextGame-v0", "sglang": block, "vllm": block}, notes.append)
    assert config_from_mapping(TrainConfig, settings) == TrainConfig(env="TextGame-v0") and not notes


def test_a_removed_setting_is_ignored_with_a_line_unless_it_has_todays_value() -> None:
    notes: list[str] = []
    block = {"replicas": 2, "serving": {"update_s": 600.0, "affinity_margin": 3.0}}
    settings = with_current_names({"env": "TextGame-v0", "engine": "sglang", "sglang": block}, notes.append)
    assert config_from_mapping(TrainConfig, settings).server == ServerConfig(replicas=2)
    assert notes[0] == "the setting sglang.serving.affinity_margin is left out: it is always 2" and len(notes) == 2
    notes.clear()
    ray = {"engines": 2, "deltas": True, "broadcast": False}
    config = config_from_mapping(TrainConfig, with_current_names({"env": "TextGame-v0", "ray": ray}, notes.append))
    assert config.ray == ClusterConfig(engines=2)
    assert notes == ["the setting ray.deltas is left out: engines read new weights from the object store"]


@pytest.mark.parametrize("command", ["train --env X", "eval --env X", "generate --input a --output b"])
def test_an_option_of_a_former_block_names_that_of_today(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--engine", "sglang", "--sglang.serving.sync", "disk"]) == 2
    assert "did you mean '--server.serving.sync'?" in capsys.readouterr().err


def test_a_servers_port_is_below_those_that_connections_get(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as client, socket.create_server(("127.0.0.1", 0)) as anybody:
        client.connect(anybody.getsockname())
        smallest = min(client.getsockname()[1], anybody.getsockname()[1])
        ports = {free_port() for _ in range(20)}
        assert max(ports) < smallest and len(ports) > 15
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(server_process, "NUM_PORTS", 1)
        monkeypatch.setattr(server_process, "_first_ephemeral_port", lambda: port + 1)
        with pytest.raises(EngineError, match=f"no port between {port} and {port + 1} is free"):
            free_port()


def test_a_server_without_its_library_ends_with_its_log_and_the_setting(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import no_such_engine"]
    server = ServerProcess(ServerCommand(name="small", words=words, port=free_port(), log=tmp_path / "log"))
    with pytest.raises(
        EngineError, match=r"No module named 'no_such_engine'\nname the interpreter .* with --server\.python"
    ) as error:
        asyncio.run(start_together([server]))
    assert "\nTraceback" not in str(error.value)  # where the command line cuts the message off


def test_a_temporary_log_is_deleted_unless_its_server_died(tmp_path: Path) -> None:
    port = free_port()
    words = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]

    async def run(folder: Path, *, dies: bool, keeps_log: bool = False) -> None:
        command = ServerCommand(
            name="small", words=words, port=port, log=folder / "0.log", keeps_log=keeps_log, ready_path="/", ready_s=30
        )
        server = ServerProcess(command)
        await server.start()
        if dies:
            os.kill(server.pid, signal.SIGKILL)
            while server.alive:
                await asyncio.sleep(0.02)
        await server.close()

    for name, settings in {"well": {}, "died": {"dies": True}, "kept": {"keeps_log": True}}.items():
        asyncio.run(run(tmp_path / name, **{"dies": False, **settings}))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["died", "kept"]
