"""`agentgym export` from the command line, on a run that was trained there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentgym.cli.main import main

SMALL = "train --env TextGame-v0 --env-kwargs level=1 --tasks 2 --group-size 3 --eval.episodes 0"


@pytest.mark.slow
def test_a_run_keeps_what_it_is_told_to_and_exports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    settings = "--steps 3 --checkpoint.every 1 --checkpoint.keep 1 --checkpoint.keep-best reward_mean"
    assert main([*SMALL.split(), *settings.split(), "--limits.max-turns", "4", "--output", run]) == 0
    stay = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    best = (tmp_path / "run" / "checkpoints" / "best").read_text().strip()
    assert stay == {"best", best, "step-000003"}
    capsys.readouterr()
    assert main(["export", run, out, "--best", "--dtype", "bfloat16", "--json"]) == 0
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert json.loads(printed.out)["checkpoint"].endswith(best)
    assert lines[0] == f"model of step {int(best[5:])} (bfloat16): {out}" and f"--policy {out}" in lines[1]
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in Path(out).iterdir()} == files

    def refused(*args: str) -> str:
        assert main(["export", *args]) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("error: ") and "\n" not in error
        return error

    assert "is taken already" in refused(run, out)
    assert "is a model folder already" in refused(out, str(tmp_path / "new"))
    assert "there is no folder" in refused(str(tmp_path / "runs"), str(tmp_path / "new"))
    assert "there are those of" in refused(run, str(tmp_path / "new"), "--step", "9")
    assert "bfloat16" in refused(run, str(tmp_path / "new"), "--dtype", "int8")
    assert "DIR" in refused(run)
    assert not (tmp_path / "new").exists()
    assert main(["train", "--resume", "--output", run, "--steps", "4", "--checkpoint.keep", "0"]) == 0
    assert (tmp_path / "run" / "checkpoints" / "step-000004").is_dir()


@pytest.mark.long
def test_an_adapter_is_exported_alone_or_merged(
    tmp_path: Path, finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    few = [*SMALL.split(), "--steps", "1", "--limits.max-turns", "2", "--family", "granite4"]
    assert main([*few, "--learner.lora.rank", "2", "--output", run]) == 0
    capsys.readouterr()
    assert main(["export", run, out, "--adapter", "--dtype", "bfloat16"]) == 0
    assert f"adapter of step 1 (bfloat16): {out}" in capsys.readouterr().out
    assert {path.name for path in Path(out).iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert main(["eval", "--env", "TextGame-v0", "--policy", out, "--output", str(tmp_path / "eval")]) == 2
    assert "has an adapter that is not merged into a model" in capsys.readouterr().err
    assert main(["export", run, str(tmp_path / "merged")]) == 0
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert f"--policy {tmp_path / 'merged'} --family granite4\n" in capsys.readouterr().out
    assert main(["export", str(finished_run), str(tmp_path / "none"), "--adapter"]) == 2
    assert "Leave adapter out, or train with learner.lora.rank" in capsys.readouterr().err
