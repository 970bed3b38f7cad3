"""`agentgym plan`: what it shows, what it refuses, and what it needs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
LAYOUT = re.compile(r"^\| .* of 8 (\w+) \| (\S+) \| `(--ray\.learners .*)` \| (\d+) of (\d+) GiB \| (\d+) \|$", re.M)


def test_a_plan_shows_memory(agentgym: Command) -> None:
    done = agentgym(*"plan --model 1.7B --learner.micro-batch-tokens 16384 --json".split())
    assert done.code == 0
    for text in ("1,720,574,976 parameters", "H100, 79 GiB", "learner: optimizer", "engine: keys and values"):
        assert text in done.text
    report = done.json
    assert report["fits"] and report["parameters"] == 1_720_574_976
    assert sum(report["learner_memory_gib"].values()) == pytest.approx(report["learner_total_gib"], abs=0.01)
    assert "learner: gradients" in done.text
    assert report["engine_sequences"] > 0


def test_what_does_not_fit_ends_with_what_would(agentgym: Command) -> None:
    done = agentgym(*"plan --model 32B --gpu h200 --json".split())
    assert done.code == 1
    assert "error: the learner does not fit on 1 GPU" in done.err and "what would fit: " in done.err
    assert not done.json["fits"]
    for offer in done.json["would_fit"]:
        assert agentgym("plan", "--model", "32B", "--gpu", "h200", *offer.split()).code == 0


def test_settings_of_a_run_have_the_names_of_training(agentgym: Command) -> None:
    settings = "--learner.lora.rank 8 --optimizer.name muon --learner.micro-batch-tokens 4096 --group-size 4 --tasks 2"
    assert agentgym("plan", "--model", "embedded", *settings.split()).code == 0
    assert agentgym("train", "--env", "TextGame-v0", "--print-config", *settings.split()).code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model 33B", "did you mean '32B'"),
        ("", "missing --model"),
        ("--model 8B --gpu h300", "the memory of a GPU 'h300' is not known"),
        ("--model 8B --gpu.memory 80", "did you mean '--gpu.memory-gib'"),
        ("--model 8B --ray.learners 0", "ray.learners must be at least 1"),
        ("--model 8B --ray.learners 3 --learner.mesh.sequence 2", "no multiple of learner.mesh.sequence 2"),
    ],
)
def test_errors_take_one_line(options: str, message: str, agentgym: Command) -> None:
    done = agentgym("plan", *options.split())
    assert done.code == 2
    assert message in done.err


def test_the_layouts_of_the_docs_are_planned_and_settings_of_training(agentgym: Command) -> None:
    page = PAGE.read_text()
    common = re.findall(
        r"--(?:ray|learner)\.\S+(?: \w+)?", page[page.index("Common to all commands") :].split("...")[0]
    )
    layouts = LAYOUT.findall(page)
    assert len(layouts) == 4 and len(common) == 4
    for gpu, model, further, learner, memory, episodes in layouts:
        options = shlex.split(" ".join([*common, further]))
        assert agentgym("train", "--env", "TextGame-v0", "--executor", "ray", "--print-config", *options).code == 0
        planned = further.replace('--server.server-args "--tp-size 2"', "--engine.tensor-parallel 2")
        report = agentgym("plan", "--model", model, "--gpu", gpu, *" ".join([*common, planned]).split(), "--json").json
        assert report["fits"]
        assert f"{report['learner_total_gib']:.0f} of {report['gpu_gib']:.0f}" == f"{learner} of {memory}"
        assert report["engine_sequences"] == int(episodes)
