"""The report holds a run exactly, lets no model text act, and says what is wrong with a folder."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.main import main
from agentgym.errors import RunFolderError
from agentgym.rollout.record.folder_digests import write_digests
from agentgym.rollout.record.manifest import replacing
from agentgym.trainers.trackers.protocol import TrackedRun
from agentgym.viewer import EpisodeSummary, read_run, visible, write_curve, write_report
from agentgym.viewer.report import choose

MakeRun = Callable[..., Path]


def blocks(page: Path) -> dict[str, Any]:
    """The data of a page, unpacked as its script does it."""
    blocks_of_page = re.findall(
        r'<script type="text/plain" id="(\w+)">([^<]*)</script>', page.read_text(encoding="utf-8")
    )
    return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in blocks_of_page}


def recorded(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines()]


def write_episodes(run: Path, episodes: list[dict[str, Any]]) -> None:
    (run / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in episodes), encoding="utf-8")


def test_every_embedded_episode_comes_back_as_it_was_recorded(make_run: MakeRun, vocabulary: Any) -> None:
    run = make_run()
    episodes = recorded(run)
    episodes[0]["rows"][0]["spans"][1]["excluded"] = "unused"
    write_episodes(run, episodes)
    data = blocks(write_report(run, decode_token=vocabulary.text))
    assert data["overview"]["num_embedded"] == data["overview"]["num_episodes"] == len(episodes) == 56
    for line, episode in enumerate(episodes, 1):
        episode_shown = data[f"e{line}"]
        assert episode_shown["turns"] == episode["turns"]
        assert episode_shown["advantages"] == episode["advantages"]
        assert episode_shown["error"] == episode["error"]
        for spans, row in zip(episode_shown["rows"], episode["rows"], strict=True):
            for (source, ids, logprobs, versions, excluded), span in zip(spans, row["spans"], strict=True):
                assert ["prompt", "policy", "env"][source] == span["source"]
                assert ids == span["ids"] and excluded == span.get("excluded", "")
                assert versions == span.get("policy_versions")
                if source == 1:
                    assert logprobs == pytest.approx(span["logprobs"], abs=1e-4)


def episodes_as_lines(run: Path) -> Path:
    assert main(["episodes", str(run), str(run / "table.jsonl")]) == 0
    return run / "table.jsonl"


def run_of(run: Path) -> TrackedRun:
    return TrackedRun(name="run", project="p", folder=run, config={})


WRITERS: dict[str, Callable[[Path], object]] = {
    "report.html": write_report,
    "curve.png": lambda run: write_curve([{"step": 1, "success": 0.5}], run / "curve.png"),
    "table.jsonl": episodes_as_lines,
    "digests.json": lambda run: write_digests(run, {}, ("episodes.jsonl",)),
    "trackers/mlflow.txt": lambda run: run_of(run).keep("mlflow", "run-1"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_in_a_run_is_replaced_and_not_followed(name: str, make_run: MakeRun, tmp_path: Path) -> None:
    run, victim = make_run(), tmp_path / "victim"
    victim.write_text("precious")
    (run / name).parent.mkdir(exist_ok=True)
    before = {path.name for path in (run / name).parent.iterdir()}
    (run / name).symlink_to(victim)
    WRITERS[name](run)
    assert victim.read_text() == "precious" and (run / name).read_bytes() and not (run / name).is_symlink()
    assert {path.name for path in (run / name).parent.iterdir()} == before | {Path(name).name}


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_beside(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "report.html") as part:
        part.write_text("half")
        1 / 0  # noqa: B018
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report.html", "old")]


def test_the_table_and_the_curves_hold_the_run(make_run: MakeRun, vocabulary: Any) -> None:
    run = make_run()
    overview = blocks(write_report(run, decode_token=vocabulary.text))["overview"]
    assert [(row[0], row[1], row[8]) for row in overview["episodes"]] == [
        (line, episode["phase"], episode["reward"]) for line, episode in enumerate(recorded(run), 1)
    ]
    series = overview["curves"]["series"]
    curves = {each["key"]: each["values"] for each in series if not each["extra"]}
    assert [each["key"] for each in series if each["extra"]] == [
        "dead_groups", "episodes", "generate_s", "lr", "trained_tokens", "update_s",
    ]  # fmt: skip
    assert list(curves) == [
        "success", "reward_mean", "loss", "entropy", "kl", "grad_norm", "clip_fraction", "malformed_calls",
        "sampled_tokens_per_s",
    ]  # fmt: skip
    assert curves["grad_norm"][3] is None, "a NaN is a gap in the curve"
    assert curves["sampled_tokens_per_s"][0] == 200
    assert [point["phase"] for point in overview["evaluations"]] == ["eval_before", "eval_after"]


def test_an_evaluation_shows_the_pass_at_k_numbers_of_its_result(make_run: MakeRun) -> None:
    run = make_run()
    assert blocks(write_report(run))["overview"]["at_k"] == []
    scores = {"env": "TextGame-v0", "difficulty": None, "num_tasks": 2, "k": [{"k": 1, "pass_at_k": 0.5}]}
    (run / "result.json").write_text(json.dumps({"success": 0.5, "at_k": [scores]}), encoding="utf-8")
    assert blocks(write_report(run))["overview"]["at_k"] == [scores]


@pytest.mark.parametrize("text", ["[]", '{"at_k": 3}', '{"at_k": [{"env": null}]}', '{"at_k'])
def test_an_invalid_result_is_named(make_run: MakeRun, text: str) -> None:
    run = make_run()
    (run / "result.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"result\.json is not a result of `agentgym eval`.*delete it"):
        write_report(run)


def test_signs_of_collapse_are_told_with_the_steps_that_showed_them(make_run: MakeRun) -> None:
    run = make_run()
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert blocks(write_report(run))["overview"]["signs"] == [], "lines without signs"
    for line in lines:
        line["signs"] = ["clipped"] * (4 <= line["step"] <= 7) + ["solved"] * (line["step"] == 9)
        line["warnings"] = {4: ["clipped: 95% <b>of</b> it"], 9: ["solved: all"]}.get(line["step"], [])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert blocks(write_report(run))["overview"]["signs"] == [
        {"text": "clipped: 95% <b>of</b> it", "step": 4, "last": 7},
        {"text": "solved: all", "step": 9, "last": 9},
    ]


def test_hostile_text_reaches_the_page_as_data_only(make_run: MakeRun, vocabulary: Any) -> None:
    page = write_report(make_run(), decode_token=vocabulary.text).read_text(encoding="utf-8")
    assert "onerror" not in page and "owned" not in page and "\u202e" not in page
    assert "innerHTML" not in page and "http-equiv" in page
    assert page.count("<script") == page.count("</script>")


def test_the_name_of_the_folder_is_escaped(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run().rename(tmp_path / "<b>run&%%@DATA@%%")
    assert "<title>&lt;b&gt;run&amp;%%@DATA@%%" in write_report(run).read_text(encoding="utf-8")


def test_equal_runs_give_equal_pages(make_run: MakeRun, vocabulary: Any) -> None:
    run = make_run()
    first = write_report(run, decode_token=vocabulary.text).read_bytes()
    assert write_report(run, decode_token=vocabulary.text).read_bytes() == first


def test_without_a_tokenizer_the_page_shows_ids(make_run: MakeRun) -> None:
    assert blocks(write_report(make_run()))["overview"]["texts"]["7"] == "⟨7⟩"


def test_special_tokens_are_marked(make_run: MakeRun, vocabulary: Any) -> None:
    overview = blocks(write_report(make_run(), decode_token=vocabulary.text, special_ids=[3]))["overview"]
    marked = {overview["texts"][str(token_id)] for token_id in overview["special"]}
    assert {"<|im_start|>", "<|im_end|>", "<tool_call>", visible(vocabulary.text(3))} <= marked
    assert "lamp" not in marked


def test_a_long_run_embeds_failed_ones_first_and_last_steps_and_a_spread(make_run: MakeRun) -> None:
    run = make_run(num_steps=100, per_step=8)
    overview = blocks(write_report(run, max_episodes=120))["overview"]
    assert (overview["num_episodes"], overview["num_embedded"]) == (808, 120)
    embedded = [row for row in overview["episodes"] if row[-1]]
    num_failed = sum(row[6] == "env_error" for row in overview["episodes"])
    assert sum(row[6] == "env_error" for row in embedded) == min(num_failed, 60)
    steps = {row[2] for row in embedded if row[1] == "train"}
    assert {0, 99} <= steps and len(steps) > 40
    assert {row[1] for row in embedded} == {"eval_before", "train", "eval_after"}


def summary(line: int, status: str) -> EpisodeSummary:
    return EpisodeSummary(line, 0, "train", line, "g", 0, "X-v0", status, status, 0.0, False, 1, 2, 1, 0)


@pytest.mark.parametrize("limit", [0, 1, 7, 50, 200])
def test_the_choice_keeps_its_limit_and_the_order(limit: int) -> None:
    episodes = [summary(line, "env_error" if line % 2 else "completed") for line in range(1, 101)]
    chosen = choose(episodes, limit)
    assert len(chosen) == min(limit, 100)
    assert [e.line for e in chosen] == sorted({e.line for e in chosen})


def test_episodes_that_would_make_the_page_too_large_are_left_out(make_run: MakeRun) -> None:
    run = make_run()
    whole = write_report(run).stat().st_size
    page = write_report(run, max_bytes=10_000)
    data = blocks(page)
    embedded = [row[0] for row in data["overview"]["episodes"] if row[-1]]
    assert page.stat().st_size < whole
    assert 3 < len(embedded) == data["overview"]["num_embedded"] < data["overview"]["num_episodes"] == 56
    assert {f"e{line}" for line in embedded} == set(data) - {"overview"}
    assert max(embedded) > 40, "what is left out is spread over the run"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds nothing.*wait for the run"),
        ({"notes.txt": "x"}, "holds notes.txt"),
        ({"episodes.jsonl": "", "metrics.jsonl": ""}, "episodes.jsonl or metrics.jsonl was wanted"),
        ({"metrics.jsonl": '{"step": 0}\n{"step": 1, "lo'}, "metrics.jsonl, line 2 is not JSON.*try again.*resume"),
        ({"episodes.jsonl": "[]\n"}, "line 1 is a JSON list; an object was wanted"),
        ({"episodes.jsonl": '{"phase": "train"}\n'}, "line 1 is not an episode .KeyError: 'turns'"),
    ],
)
def test_a_folder_that_is_no_whole_run_is_reported(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(RunFolderError, match=message):
        write_report(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("source", "engine"), ("logprobs", [None, "x"]), ("ids", 7)])
def test_an_invalid_span_is_named_by_its_line(make_run: MakeRun, key: str, value: Any) -> None:
    run = make_run()
    lines = recorded(run)
    lines[4]["rows"][0]["spans"][1][key] = value
    write_episodes(run, lines)
    with pytest.raises(RunFolderError, match=r"line 5 is not an episode.*agentgym verify"):
        write_report(run)


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="does not exist; a run folder was wanted"):
        write_report(tmp_path / "nowhere")


def test_a_run_without_episodes_has_curves_alone(make_run: MakeRun) -> None:
    run = make_run()
    (run / "episodes.jsonl").unlink()
    assert list(blocks(write_report(run))) == ["overview"]


def test_evaluations_are_drawn_where_no_step_played(make_run: MakeRun) -> None:
    run = make_run()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lesson = [{"step": line["step"], "loss": line["loss"]} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lesson), encoding="utf-8")
    overview = blocks(write_report(run))["overview"]
    curves = {series["title"]: series["values"] for series in overview["curves"]["series"]}
    assert set(curves) == {"Success", "Reward", "Loss"} and set(curves["Success"]) == {None}


def test_the_curve_is_a_png(make_run: MakeRun) -> None:
    run = read_run(make_run())
    path = write_curve(run.metrics, run.path / "curve.png", run.evaluations)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [(point.phase, point.num_episodes) for point in run.evaluations] == [("eval_before", 4), ("eval_after", 4)]


def test_episodes_replaces_no_record_of_its_run(make_run: MakeRun) -> None:
    run = make_run()
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    for name in ("metrics.jsonl", "episodes.jsonl", "tools.jsonl"):
        assert main(["episodes", str(run), str(run / name)]) == 2
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before
