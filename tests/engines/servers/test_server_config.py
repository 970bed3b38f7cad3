"""The two kinds of servers are configured alike, and each says what its settings mean."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import yaml

from agentgym.cli.main import main
from agentgym.engines.servers import server_process
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.server_process import ServerCommand, ServerProcess, free_port, start_together
from agentgym.engines.sglang.engine import SglangConfig
from agentgym.engines.vllm.engine import VllmConfig
from agentgym.errors import ConfigError, EngineError

KINDS = [(SglangConfig, "an SGLang server"), (VllmConfig, "a vLLM server")]


def test_words_for_a_server_are_arguments_of_an_embedded_engine() -> None:
    words = ("--max-model-len", "4096", "--enforce-eager", "--no-enable-chunked-prefill", "--dtype=float32")
    config = VllmConfig(embedded=True, server_args=words)
    assert config.arguments == {
        "max_model_len": 4096,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "dtype": "float32",
    }
    with pytest.raises(ConfigError, match="--NAME VALUE words, got '4096'"):
        VllmConfig(server_args=("4096",)).arguments  # noqa: B018
    for others in ({"urls": ("http://a:1",)}, {"python": "python3"}, {"replicas": 2}):
        with pytest.raises(ConfigError, match="leave urls, python and replicas out"):
            VllmConfig(embedded=True, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_words_for_a_server_are_given_in_quotation_marks(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    train, option = ["train", "--env", "TextGame-v0", "--engine", kind, "--print-config"], f"--{kind}.server-args"
    assert main([*train, option, "--tp-size 2 --seed=3", "--steps", "4"]) == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert settings[kind]["server_args"] == ["--tp-size", "2", "--seed=3"]
    assert settings["steps"] == 4
    assert main([*train, option, "--tp-size", "2"]) == 2
    assert f"in quotation marks: {option} '--tp-size ...'" in capsys.readouterr().err
    words = ("--speculative-config", '{"method": "ngram"}', '--override={"a": 1}')
    assert VllmConfig(server_args=words).server_args == words


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_what_no_server_can_be_is_refused(kind: type[ServerConfig], name: str) -> None:
    with pytest.raises(ConfigError, match="replicas must be at least 1, got 0"):
        kind(replicas=0)
    with pytest.raises(ConfigError, match=f"the URL of {name} begins with http://, got 'localhost:8000'"):
        kind(urls=("localhost:8000",))
    with pytest.raises(ConfigError, match="'http://a:1' is given twice"):
        kind(urls=("http://a:1", "http://a:1/"))


def test_the_command_line_says_what_a_setting_is_to_its_kind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # one column of panels
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    shown = " ".join(line.strip("│ \n") for line in capsys.readouterr().out.splitlines())
    for help_text in (
        "Running servers, such as http://127.0.0.1:30000; none launches new ones. Each request sends the variable",
        "They need VLLM_SERVER_DEV_MODE=1, --enable-scale-out",
        "The interpreter that has SGLang (0.5.23 or later); empty is the one that runs agentgym.",
        "The interpreter that has vLLM (0.32 or later); empty is the one that runs agentgym.",
        "Further arguments of `sglang.launch_server`, or of `ServerArgs` if embedded, all in one pair",
        "Further arguments of `vllm.entrypoints.openai.api_server`, or of `AsyncEngineArgs` if embedded, all in",
    ):
        assert shown.count(help_text) == 1, help_text


def test_a_servers_port_is_below_those_that_connections_get(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as client, socket.create_server(("127.0.0.1", 0)) as anybody:
        client.connect(anybody.getsockname())
        given = min(client.getsockname()[1], anybody.getsockname()[1])
        ports = {free_port() for _ in range(20)}
        assert max(ports) < given and len(ports) > 15
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(server_process, "NUM_PORTS", 1)
        monkeypatch.setattr(server_process, "_first_ephemeral_port", lambda: port + 1)
        with pytest.raises(EngineError, match=f"no port between {port} and {port + 1} is free"):
            free_port()


def test_a_server_without_its_library_ends_with_its_log_and_the_setting(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import no_such_engine"]
    server = ServerProcess(ServerCommand(name="small", words=words, port=free_port(), log=tmp_path / "log"))
    with pytest.raises(
        EngineError, match=r"No module named 'no_such_engine'\nname the interpreter .* with --it"
    ) as error:
        asyncio.run(start_together([server], "--it"))
    assert "\nTraceback" not in str(error.value)  # where the command line cuts the message off


def test_a_temporary_log_goes_with_a_server_that_ended_well_and_stays_with_one_that_died(tmp_path: Path) -> None:
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
