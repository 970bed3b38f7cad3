"""`agentgym algorithms list` tells of every algorithm what its function says, and so does the page in `docs/`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from pages import algorithms_page

from agentgym.cli.main import main
from agentgym.registry import Registry
from agentgym.settings.functions import is_bundled
from agentgym.trainers import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_PENALTIES, LOSSES
from agentgym.trainers.algorithms.catalog import all_algorithms
from agentgym.trainers.algorithms.optimizers import OPTIMIZERS, SCHEDULES
from agentgym.trainers.algorithms.presets import PRESETS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"


def test_every_entry_of_every_table_is_listed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out.splitlines()[-1])["algorithms"]
    tables = {"advantage": ADVANTAGES, "loss": LOSSES, "kl": KL_PENALTIES}
    tables |= {"aggregation": AGGREGATIONS, "correction": CORRECTIONS}  # type: ignore[dict-item]
    tables |= {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "preset": PRESETS}  # type: ignore[dict-item]
    assert {(entry["kind"], entry["name"]) for entry in listed} == {
        (kind, name) for kind, table in tables.items() for name in table
    }
    by_name = {entry["name"]: entry for entry in listed if entry["kind"] != "preset"}
    assert by_name["gigpo"]["settings"]["step_weight"] == 1.0 and by_name["ppo_clip"]["settings"]["dual_clip"] == 3.0
    assert "values_BT" in by_name["gae"]["inputs"] and "values_BT" not in by_name["gigpo"]["inputs"]
    assert not by_name["proximal_by_version"]["settings"].keys() & {"versions", "current", "sequences"}


def test_each_one_names_what_it_is_and_where_it_comes_from() -> None:
    for algorithm in all_algorithms():
        assert algorithm.summary.endswith((".", ":")), algorithm.name
        assert "sequences" not in algorithm.settings
    years = [str(year) for year in range(1990, 2030)]
    sourced = [algorithm for algorithm in all_algorithms() if algorithm.kind in ("advantage", "loss")]
    assert not [algorithm.name for algorithm in sourced if not any(year in algorithm.details for year in years)]


def test_the_page_is_what_the_script_writes() -> None:
    assert algorithms_page() == PAGE.read_text(encoding="utf-8"), "run python docs/pages.py"


@pytest.mark.long
def test_an_algorithm_of_a_user_is_a_function_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    program = """
from agentgym.trainers import LOSSES
from agentgym.trainers.algorithms.losses import PolicyLoss, reinforce
@LOSSES.register("mine")
def mine(logp, old_logp, advantages, mask, *, sequences=None, scale=2.0):
    "Twice the plain one."
    told = reinforce(logp, old_logp, advantages, mask)
    return PolicyLoss(scale * told.loss, told.stats)
from agentgym.trainers.learner import LearnerConfig
LearnerConfig(loss="mine", loss_settings={"scale": 3.0})
from agentgym.cli.main import main
main(["algorithms", "list", "--json"])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    (mine,) = [entry for entry in json.loads(result.stdout.splitlines()[-1])["algorithms"] if entry["name"] == "mine"]
    assert mine["settings"] == {"scale": 2.0} and mine["summary"] == "Twice the plain one."


def test_the_tables_cost_nothing_until_they_are_asked_for() -> None:
    program = "import sys, agentgym.trainers; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    with pytest.raises(ImportError, match="cannot import name 'LOSES'"):
        exec("from agentgym.trainers import LOSES")


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ("Presets", PRESETS),
        ("Advantages", ADVANTAGES),
        ("Losses", LOSSES),
        ("KL penalties", KL_PENALTIES),
        ("Aggregations", AGGREGATIONS),
        ("Corrections", CORRECTIONS),
    ],
)
def test_the_table_beside_verl_has_a_line_for_every_name_and_no_other(section: str, names: Iterable[str]) -> None:
    page = PAGE.with_name("verl.md")
    if not page.exists():
        pytest.skip("the pages of the documentation are not beside the package")
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page.read_text(encoding="utf-8"), re.M | re.S))
    lines = [line.strip("|").split("|") for line in sections[section].splitlines() if line.startswith("| `")]
    assert [ours.strip(" `") for ours, _, _ in lines] == [name for name in names if is_ours(names, name)]
    assert all(verls.strip() and (ours.strip() or verls.strip() == "none") for _, verls, ours in lines)


def is_ours(names: Iterable[str], name: str) -> bool:
    """Whether a preset, or a function of ours and not one that a test has registered."""
    return not isinstance(names, Registry) or is_bundled(names[name])
