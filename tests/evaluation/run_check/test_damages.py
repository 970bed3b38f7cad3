"""Each damage of a finished run is noticed, by the property that is named; what the run's writers recompute with it is
noticed by `--deep`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.cli.verify import main
from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError
from agentgym.evaluation.run_check.verify import VerifyReport, verify_run
from agentgym.rollout.record.chain import chained_lines
from agentgym.rollout.record.episode_digests import credit_digest, mask_runs, row_digest
from agentgym.rollout.record.folder_digests import write_digests
from agentgym.rollout.record.line_reader import LineReader

Record = dict[str, Any]
Damage = Callable[[Path], None]
SAMPLED = "policy"


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, records: list[Record]) -> None:
    """Writes the lines as the run does, with the digests that they have."""
    path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))


def changed(file: str, change: Callable[[list[Record]], object]) -> Damage:
    """Changes the lines of a file in place, and no digest."""

    def damage(run: Path) -> None:
        records = read(run / file)
        change(records)
        write(run / file, records)

    return damage


def episode(phase: str, change: Callable[[Record], object], number: int = 0) -> Damage:
    """Changes one episode of a phase; not the first line, which has the same prompt as none."""

    def pick(records: list[Record]) -> None:
        change([record for record in records if record["phase"] == phase and record["reward"] is not None][number])

    return changed("episodes.jsonl", pick)


def metric(name: str, value: float) -> Damage:
    return changed("metrics.jsonl", lambda lines: lines[0].update({name: value}))


def span(record: Record, source: str = SAMPLED) -> Record:
    return next(part for row in record["rows"] for part in row["spans"] if part["source"] == source)


def add(value: dict[Any, Any] | list[Any], key: Any, number: float) -> None:
    value[key] += number


def flip_bit(file: str) -> Damage:
    def damage(run: Path) -> None:
        (path,) = run.glob(f"checkpoints/step-000001/{file}")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    return damage


def replace_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/step-000001")
    shutil.copytree(run / "checkpoints/step-000002", run / "checkpoints/step-000001")


def edit(file: str, old: str, new: str) -> Damage:
    def damage(run: Path) -> None:
        text = (run / file).read_text()
        assert old in text
        (run / file).write_text(text.replace(old, new, 1))

    return damage


def exclude(record: Record) -> None:
    span(record)["excluded"] = True


def exclude_with_mask(record: Record) -> None:
    exclude(record)
    for row in record["rows"]:
        row["mask"] = mask_runs(row["spans"])


def move_reward(record: Record) -> None:
    record["turns"][0]["reward"] += 1.0
    record["turns"][-1]["reward"] -= 1.0


def swap_members(records: list[Record]) -> None:
    first, second = [record for record in records if record["phase"] == "train"][:2]
    first["member"], second["member"] = second["member"], first["member"]


def drop(phase: str, *, everything: bool = False) -> Damage:
    def change(records: list[Record]) -> None:
        phase_records = [record for record in records if record["phase"] == phase]
        for record in phase_records if everything else phase_records[1:2]:
            records.remove(record)

    return changed("episodes.jsonl", change)


def of_group(change: Callable[[Record], object]) -> Damage:
    """Changes the task of all episodes of a group."""

    def every(records: list[Record]) -> None:
        group = next(record["group"] for record in records if record["phase"] == "train")
        for record in records:
            if record["phase"] == "train" and record["group"] == group:
                change(record["task"])

    return changed("episodes.jsonl", every)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "one sampled id": (episode("train", lambda record: add(span(record)["ids"], 0, 1)), "digest"),
    "one id of the environment": (episode("train", lambda record: add(span(record, "env")["ids"], 0, 1)), "digest"),
    "one logprob": (episode("train", lambda record: add(span(record)["logprobs"], 0, -0.5)), "digest"),
    "a reward moved between turns": (episode("train", move_reward), "credit"),
    "a status": (episode("train", lambda record: record.update(status="env_error")), "status"),
    "a stop reason": (episode("train", lambda record: record.update(stop_reason="cancelled")), "chain"),
    "a finish reason": (
        episode("train", lambda record: record["turns"][0].update(finish_reason="length")),
        "stop_token",
    ),
    "success in training": (
        episode("train", lambda record: record.update(success=not record["success"])),
        "trajectory",
    ),
    "a training episode is gone": (drop("train"), "groups"),
    "two members are swapped": (changed("episodes.jsonl", swap_members), "chain"),
    "a reply is excluded": (episode("train", exclude), "mask"),
    "a reply is excluded with its mask": (episode("train", exclude_with_mask), "metrics"),
    "the seed of an evaluation": (episode("eval_before", lambda record: add(record["task"], "seed", 1)), "chain"),
    "a bit of the model": (flip_bit("model.safetensors"), "checkpoints"),
    "a bit of the optimizer": (flip_bit("learner/*.distcp"), "checkpoints"),
    "a checkpoint of another step": (replace_checkpoint, "checkpoints"),
    "the algorithm": (edit("config.yaml", "algo: grpo", "algo: rloo"), "settings"),
    "the temperature": (edit("config.yaml", "temperature: 1.0", "temperature: 0.9"), "settings"),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), "end"),
    "the last line of metrics is gone": (changed("metrics.jsonl", lambda lines: lines.pop()), "end"),
    "the first line of metrics is gone": (changed("metrics.jsonl", lambda lines: lines.pop(0)), "chain"),
    "a loss": (metric("loss", 0.25), "chain"),
    "a gradient norm": (metric("grad_norm", 0.25), "chain"),
    "a mismatch": (metric("mismatch_max", 0.0), "chain"),
    "a time": (metric("generate_s", 0.25), "chain"),
    "a count of cut replies": (metric("replies_cut", 7), "metrics"),
    "a count of episodes left out": (metric("left_out", 7), "metrics"),
    "a count of failed calls": (metric("tool_errors", 7), "metrics"),
    "no evaluation after training": (drop("eval_after", everything=True), "end"),
    "an evaluation episode is gone": (drop("eval_before"), "chain"),
    "success in an evaluation": (
        episode("eval_after", lambda record: record.update(success=not record["success"])),
        "chain",
    ),
    "the seed of a group": (of_group(lambda task: add(task, "seed", 1)), "chain"),
    "the environment of a group": (of_group(lambda task: task.update(env_id="LongRoad-v0")), "chain"),
    "the keywords of a group": (of_group(lambda task: task.update(kwargs={"level": 2})), "chain"),
    "the metrics of an episode": (episode("train", lambda record: add(record["metrics"], "num_turns", 1)), "chain"),
    "a component of a reward": (
        episode("train", lambda record: record["metrics"].update({"reward/style": 1})),
        "chain",
    ),
    "the report": (edit("report.html", "<html", "<html "), "report"),
    "the end of the report": (lambda run: _cut(run / "report.html"), "report"),
    "the digests": (edit("digests.json", '"config.yaml": "', '"config.yaml": "0'), "end"),
    "a manifest": (edit("checkpoints/step-000002/manifest.json", '"step": 2', '"step": 2, "x": 1'), "checkpoints"),
}


def rewritten(change: Callable[[list[Record]], object]) -> Damage:
    """Changes episodes as a wrong writer would: with every digest of the run that follows from them."""

    def damage(run: Path) -> None:
        path = run / "episodes.jsonl"
        records = read(path)
        change(records)
        before = [record.pop("chain") for record in records]
        for record in records:
            for row in record["rows"]:
                row["digest"] = row_digest(row["spans"])
            record["credit"] = credit_digest([turn["reward"] for turn in record["turns"]], record["advantages"])
        lines, _ = chained_lines([json.dumps(record, separators=(",", ":")) for record in records])
        path.write_bytes(lines)
        heads = dict(zip(before, (record["chain"] for record in read(path)), strict=True))
        for file in [*run.glob("checkpoints/*/manifest.json"), run / "digests.json"]:
            text = file.read_text()
            for old, new in heads.items():
                text = text.replace(old, new)
            file.write_text(text)
        digests = json.loads((run / "digests.json").read_text())
        write_digests(run, {name: digests[name] for name in ("episodes.jsonl", "metrics.jsonl")}, ("config.yaml",))

    return damage


def every(change: Callable[[Record], object]) -> Callable[[list[Record]], object]:
    """The change of every training episode that was credited."""
    return lambda records: [change(record) for record in records if record["advantages"] is not None]


def scaled(factor: float) -> Callable[[Record], None]:
    def scale(record: Record) -> None:
        record["advantages"] = [[factor * value for value in row] for row in record["advantages"]]

    return scale


def scale_one(records: list[Record]) -> None:
    scaled(3.0)(next(record for record in records if record["advantages"] and record["advantages"][0][0]))


def halve_logprobs(record: Record) -> None:
    for row in record["rows"]:
        for part in row["spans"]:
            if part["source"] == SAMPLED:
                part["logprobs"] = [value / 2 - 1 for value in part["logprobs"]]


def age(record: Record) -> None:
    if record["step"] == 1:
        for row in record["rows"]:
            for part in row["spans"]:
                if part["source"] == SAMPLED:
                    part["policy_versions"] = [77 for _ in part["ids"]]


def win(records: list[Record]) -> None:
    """An episode after training that was lost was won; the score of an evaluation before it is in metrics.jsonl too."""
    record = next(record for record in records if record["phase"] == "eval_after" and record["reward"] == 0.0)
    record["turns"][-1]["reward"] = record["reward"] = record["metrics"]["success"] = 1.0
    record["success"] = True


def other_seed(records: list[Record]) -> None:
    for record in records:
        if record["phase"] == "train" and record["group"] == "1/0":
            record["task"]["seed"] += 1


REWRITTEN: dict[str, tuple[Damage, str]] = {
    "all advantages with the wrong sign": (rewritten(every(scaled(-1.0))), "estimator"),
    "the advantages of one episode times three": (rewritten(scale_one), "estimator"),
    "all logprobs halved, minus one": (rewritten(every(halve_logprobs)), "model"),
    "policy version 77 in step 1": (rewritten(every(age)), "versions"),
    "the reward of an evaluation": (rewritten(win), "replay"),
    "the seed of a group": (rewritten(other_seed), "replay"),
}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run with its episodes unpacked, to be damaged."""
    copy = shutil.copytree(finished_run, tmp_path / "run")
    packed = copy / "episodes.jsonl.zst"
    with LineReader(packed) as lines:
        (copy / "episodes.jsonl").write_bytes(b"".join(lines))
    packed.unlink()
    return copy


@cache  # it takes as long as the checks of a run
def embedded_renderer() -> Renderer:
    return renderer_for(embedded_folder())


def verified(run: Path) -> VerifyReport:
    return verify_run(run, embedded_renderer())


def failed(report: VerifyReport) -> set[str]:
    return {verdict.about.name for verdict in report.verdicts if not verdict.ok}


def test_a_finished_run_is_sound_in_every_property(finished_run: Path) -> None:
    report = verified(finished_run)
    assert report.ok, report.lines()
    assert not [verdict for verdict in report.verdicts if verdict.skipped], report.lines()
    digests = json.loads((finished_run / "digests.json").read_text())
    assert report.digest == digests["run"] and f"run digest {report.digest}" in report.lines()


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_is_noticed_and_named(name: str, run: Path) -> None:
    damage, check_name = DAMAGES[name]
    damage(run)
    report = verified(run)
    assert check_name in failed(report), report.lines()
    assert report.digest is None or name.endswith("report")


def deep(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """The properties of a run by `agentgym verify --deep RUN --json`."""
    code = main([str(run), "--deep", "--json", *options])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (0 if report["ok"] else 1)
    properties: dict[str, Any] = report["properties"]
    return properties


def test_a_finished_run_is_sound_when_it_is_computed_again(
    finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    properties = deep(finished_run, capsys)
    assert all(verdict["ok"] for verdict in properties.values()), properties
    counts = {name: properties[name]["num_checked"] for name in ("estimator", "model", "replay")}
    assert counts == {"estimator": 24, "model": 24, "replay": 40}
    played = deep(finished_run, capsys, "--share", "0.5")["replay"]
    assert 10 < played["num_checked"] < 30 and played["num_checked"] + sum(played["left_out"].values()) == 40
    with pytest.raises(ConfigError, match="got 2"):
        main([str(finished_run), "--deep", "--share", "2"])


@pytest.mark.long
@pytest.mark.parametrize("name", REWRITTEN)
def test_what_a_wrong_writer_records_is_noticed_when_it_is_computed_again(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, check_name = REWRITTEN[name]
    damage(run)
    assert check_name == "versions" or verified(run).ok, "the digests are those of the damaged episodes"
    assert check_name in {name for name, verdict in deep(run, capsys).items() if not verdict["ok"]}


def test_a_checkpoint_that_was_deleted_breaks_nothing(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/step-000001")
    report = verified(run)
    assert report.ok and report.digest is not None, report.lines()


def test_a_run_that_was_killed_has_no_digest_and_its_checkpoint_holds_its_record(run: Path) -> None:
    (run / "digests.json").unlink()
    assert verified(run).ok and verified(run).digest is None
    changed("metrics.jsonl", lambda lines: lines.pop())(run)
    assert failed(verified(run)) == {"checkpoints"}


def test_a_frame_that_is_damaged_is_a_finding_and_the_others_are_checked(finished_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished_run, tmp_path / "packed")
    assert verified(run).ok
    path = run / "episodes.jsonl.zst"
    data = path.read_bytes()
    path.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    report = verified(run)
    assert {"readable", "chain"} <= failed(report) and report.num_episodes > 0
    path.write_bytes(data[:-7])
    assert {"readable", "end"} <= failed(verified(run))


def test_the_record_of_an_earlier_version_is_checked_as_far_as_it_goes(run: Path) -> None:
    """Its lines have no digests, and its checkpoints do not name the record."""
    (run / "digests.json").unlink()
    for file in ("episodes.jsonl", "metrics.jsonl"):
        changed(file, lambda lines: [line.pop("chain") for line in lines])(run)
    for path in run.glob("checkpoints/*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["record"]
        path.write_text(json.dumps(manifest))
    report = verified(run)
    assert report.ok, report.lines()
    assert {verdict.about.name for verdict in report.verdicts if verdict.skipped} == {"chain", "settings", "end"}
    changed("metrics.jsonl", lambda lines: lines.pop(0))(run)
    assert failed(verified(run)) == {"metrics"}
