"""`--agent` of `eval` and `train`: an agent of the user's plays, and its mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentgym.cli.main import main

AGENT = """
import json, urllib.request

def post(url, key, body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)

def play(episode):
    messages = list(episode.messages)
    while True:
        body = {"messages": messages, "tools": list(episode.tools)}
        reply = post(f"{episode.base_url}/chat/completions", episode.api_key, body)
        answer = post(f"{episode.root_url}/step", episode.api_key, {})
        if answer["terminated"] or answer["truncated"]:
            return
        messages += [reply["choices"][0]["message"], *answer["messages"]]
"""
GAME = ["--env", "TextGame-v0", "--env-kwargs", "level=1"]


@pytest.fixture
def agent(tmp_path: Path) -> str:
    (tmp_path / "agent.py").write_text(AGENT, encoding="utf-8")
    return f"{tmp_path / 'agent.py'}:play"


@pytest.mark.long
def test_a_function_that_passes_on_what_it_gets_leaves_the_record_of_eval(
    agent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, own = tmp_path / "run", tmp_path / "own"
    assert main(["eval", *GAME, "-n", "6", "--agent", agent, "--output", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_failed"] == 0
    assert main(["eval", *GAME, "-n", "6", "--output", str(own)]) == 0
    assert (run / "episodes.jsonl").read_bytes() == (own / "episodes.jsonl").read_bytes()
    assert f"name: {agent}" in (run / "config.yaml").read_text(encoding="utf-8")
    assert main(["verify", "--deep", str(run)]) == 0
    assert main(["eval", "--resume", "--output", str(run)]) == 0
    capsys.readouterr()


@pytest.mark.slow
def test_a_model_is_trained_and_evaluated_on_what_an_agent_plays(
    agent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "--steps 2 --tasks 3 --group-size 2 --eval.episodes 4".split()
    run, own = tmp_path / "run", tmp_path / "own"
    assert main(["train", *GAME, *small, "--agent", agent, "--output", str(run)]) == 0
    assert main(["verify", "--deep", str(run)]) == 0
    assert main(["train", *GAME, *small, "--output", str(own)]) == 0
    assert (run / "episodes.jsonl.zst").read_bytes() == (own / "episodes.jsonl.zst").read_bytes()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("command", "args", "message"),
    [
        ("eval", ["--agent", "codx"], "did you mean 'codex'?"),
        ("train", ["--agent", "codx"], "did you mean 'codex'?"),
        ("eval", ["--agent", "codex", "--agent.program", "/nowhere"], "codex is not installed"),
        ("train", ["--agent", "codex", "--agent.program", "/nowhere"], "codex is not installed"),
        ("eval", ["--agent", "true {prompt}"], "--agent.unsafe"),
        ("eval", ["--agent", "true {prompt}", "--agent.unsafe", "--policy", "oracle"], "oracle is none"),
        ("train", ["--agent", "true {prompt}", "--agent.unsafe", "--serve", "0"], "leave one out"),
        ("train", ["--agent", "true {prompt}", "--agent.unsafe", "--executor", "ray"], "leave serve and agent out"),
        ("train", ["--agent", "true {prompt}", "--agent.unsafe", "--compaction.at", "0.5"], "leave compaction.at out"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    command: str,
    args: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, *GAME, *args]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and error.startswith("error: ") and "\n" not in error
    assert not list(tmp_path.iterdir())
