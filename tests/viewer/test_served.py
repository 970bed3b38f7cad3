"""The viewer's server: who may look, what a page is sent, and that it is what the run recorded."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from agentgym.cli.compare import last_evaluation
from agentgym.cli.main import main
from agentgym.errors import RunFolderError
from agentgym.rollout.record.settings_file import settings_text
from agentgym.rollout.scores.comparison import paired_difference, scores_by_task
from agentgym.rollout.scores.statistics import summarize
from agentgym.viewer import TokenTexts
from agentgym.viewer.served.evaluations import last_played, read_evaluation
from agentgym.viewer.served.page import app_page
from agentgym.viewer.served.run_comparison import compare_runs
from agentgym.viewer.served.run_settings import run_settings
from agentgym.viewer.served.run_view import RunView
from agentgym.viewer.served.server import ViewServer

MakeRun = Callable[..., Path]
TOKEN = "a-token-of-some-length"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def view(run: Path, decode: Callable[[int], str] | None = None) -> RunView:
    run_view = RunView(run, lambda _: TokenTexts(decode))
    run_view.index.update()
    return run_view


def ask(runs: list[RunView], act: Callable[[aiohttp.ClientSession, str], Awaitable[None]]) -> None:
    async def serve() -> None:
        async with ViewServer(runs, TOKEN, opening_key="opens-once") as server, aiohttp.ClientSession() as session:
            await act(session, server.url)

    asyncio.run(serve())


def rewrite(run: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    path = run / "episodes.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_no_request_without_the_token_and_no_foreign_page_is_answered(make_run: MakeRun) -> None:
    key = {"Authorization": f"Bearer {TOKEN}"}

    async def act(session: aiohttp.ClientSession, url: str) -> None:
        async def status(method: str, path: str, **options: Any) -> int:
            async with session.request(method, url + path, **options) as response:
                text = await response.text()
                assert "lamp" not in text or response.status == 200
                return response.status

        for method, path in [("GET", "/"), ("GET", f"/?token={TOKEN}x"), ("POST", "/state"), ("POST", "/episodes")]:
            assert await status(method, path) == 401
        assert await status("POST", f"/state?token={TOKEN}", json={}) == 401, "only the page is opened by its address"
        assert await status("POST", "/state", json={}, headers=key) == 200
        assert await status("POST", "/state", json={}, headers={**key, "Host": "rebound.example"}) == 403
        assert await status("POST", "/state", json={}, headers={**key, "Origin": "http://elsewhere.example"}) == 403
        assert await status("POST", "/state", data="{}", headers={**key, "Content-Type": "text/plain"}) == 415
        assert await status("POST", "/state", json={"x": "x" * 100_000}, headers=key) == 413
        assert [await status("GET", "/?token=opens-once") for _ in range(2)] == [200, 401]
        async with session.get(f"{url}/?token={TOKEN}") as response:
            policy = response.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
            assert response.headers["Referrer-Policy"] == "no-referrer"

    ask([view(make_run())], act)


@pytest.mark.parametrize(
    ("name", "request_body", "message"),
    [
        ("episodes", {"run": 3}, "there is no run 3"),
        ("episodes", {"filter": {"phas": "x"}, "offset": 0, "limit": 1}, "did you mean 'phase'"),
        ("episodes", {"offset": -1, "limit": 1}, "offset is a whole number"),
        ("episodes", {"offset": 0, "limit": 1, "sort": "line; DROP TABLE episodes"}, "to sort by"),
        ("episodes", {"filter": {"last_step": 2**64}, "offset": 0, "limit": 1}, "takes int"),
        ("episode", {"line": 999}, "there is no episode 999"),
        ("failures", {"by": "x"}, "grouped by"),
        ("related", {"line": 1, "kind": "x"}, "group or task"),
    ],
)
def test_a_mistake_is_one_line(make_run: MakeRun, name: str, request_body: dict[str, Any], message: str) -> None:
    async def act(session: aiohttp.ClientSession, url: str) -> None:
        options = {"json": request_body, "headers": {"Authorization": f"Bearer {TOKEN}"}}
        async with session.post(f"{url}/{name}", **options) as response:  # type: ignore[arg-type]
            answer = (await response.json())["error"]["message"]
            assert response.status == 400 and message in answer and "\n" not in answer

    ask([view(make_run())], act)


def test_an_episode_is_shown_as_it_was_recorded(make_run: MakeRun, vocabulary: Any) -> None:
    run = make_run()
    run_view = view(run, vocabulary.text)
    for number, line in enumerate((run / "episodes.jsonl").read_text(encoding="utf-8").splitlines(), 1):
        record, answer = json.loads(line), run_view.episode({"line": number})
        spans, spans_shown = record["rows"][0]["spans"], answer["rows"][0]  # type: ignore[index]
        assert [(("prompt", "policy", "env")[s[0]], s[1]) for s in spans_shown] == [
            (s["source"], s["ids"]) for s in spans
        ]
        assert answer["advantages"] == record["advantages"]
        assert [t["observation"].replace("\\u202e", "\u202e") for t in answer["turns"]] == [  # type: ignore[union-attr,index]
            turn["observation"] for turn in record["turns"]
        ]
    text = json.dumps(answer, ensure_ascii=False)
    assert "\u202e" not in text and "<script>" in text, "shown as text"


def test_a_huge_observation_is_cut_and_a_line_beyond_the_limit_refused(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    rewrite(run, lambda lines: lines[0]["turns"][0].update(observation="word " * 2_000_000))
    run_view = view(run)
    answer = json.dumps(run_view.episode({"line": 1}))
    assert len(answer) < 300_000 and "9,900,000 more characters" in answer
    monkeypatch.setattr("agentgym.viewer.served.episode_view.MAX_LINE_BYTES", 1_000_000)
    with pytest.raises(RunFolderError, match=r"episode 1 cannot be shown: it has 10,\d+,\d+ bytes"):
        run_view.episode({"line": 1})


def test_two_runs_have_the_numbers_of_compare(make_run: MakeRun, tmp_path: Path, capsys: Any) -> None:
    first = make_run().rename(tmp_path / "first")
    second = make_run().rename(tmp_path / "second")

    def win(lines: list[dict[str, Any]]) -> None:
        for line in lines[-4:]:
            line.update(success=True, reward=1.0, metrics={"success": 1.0})
            line["turns"][-1]["reward"] = 1.0

    rewrite(second, win)
    (first / "config.yaml").write_text("algo: grpo\nseed: 1\n")
    (second / "config.yaml").write_text("algo: rloo\nseed: 1\n")
    views = [view(first), view(second)]
    answer: Any = compare_runs(views)
    assert main(["compare", str(first), str(second), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["runs"]
    for summary, row in zip(answer["runs"], printed, strict=True):
        assert (summary["last"]["success"], summary["last"]["success_interval"]) == (
            row["success"],
            row["success_interval"],
        )
        assert summary["over_first"] == row["over_first"]
    assert answer["settings"] == [["algo", "grpo", "rloo"]]
    assert [task[1:3] for task in answer["runs"][1]["won"]] and not answer["runs"][1]["lost"]


def test_an_evaluation_has_the_numbers_of_its_summary(make_run: MakeRun) -> None:
    run = make_run()
    rewrite(run, lambda lines: [line["info"].update(task_digest=str(i % 3)) for i, line in enumerate(lines)])
    run_view, played = view(run), last_evaluation(run)
    evaluation, summary = read_evaluation(run_view.index, *last_played(run_view.index) or ("", 0)), summarize(played)
    assert evaluation.scores == scores_by_task(played) and paired_difference(evaluation.scores, evaluation.scores)
    assert summary.success_interval is not None
    numbers = evaluation.to_json()
    assert (numbers["success"], numbers["success_interval"]) == (summary.success, summary.success_interval.ends)


def test_a_group_and_a_task_are_found_and_a_run_that_grows_is_read_on(make_run: MakeRun) -> None:
    run = make_run()
    path = run / "episodes.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    run_view = view(run)
    before = run_view.state()
    lines = [row["line"] for row in run_view.related_episodes({"line": 5, "kind": "group"})["rows"]]  # type: ignore[union-attr,index]
    assert lines == [5, 6]
    tasks = run_view.related_episodes({"line": 1, "kind": "task"})["rows"]
    assert {(row["phase"], row["step"]) for row in tasks} == {("eval_before", 0), ("train", 0)}  # type: ignore[union-attr,index]
    assert (before["num_episodes"], before["num_indexed_bytes"] == before["num_bytes"]) == (55, False)
    path.write_bytes(whole)
    run_view.index.update()
    after = run_view.state()
    assert after["num_episodes"] == 56 and after["version"] != before["version"]


def test_settings_are_shown_without_secrets(tmp_path: Path) -> None:
    settings = {
        "algo": "grpo", "seed": 3, "reward": {"remote": {"url": "http://user:hunter2@host/x", "api_key_env": "MY_KEY"}},
        "endpoint": {"api_key": "hunter2"}, "note": "\u202eevil\x1b[31m",
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    answer = run_settings(tmp_path)
    values = dict(answer["settings"])  # type: ignore[arg-type]
    assert "hunter2" not in str(answer) and values["endpoint.api_key"] == values["reward.remote.url"] == "(hidden)"
    assert values["reward.remote.api_key_env"] == "MY_KEY" and values["seed"] == "3"
    assert values["note"] == "\\u202eevil\\x1b[31m"
    assert str(answer["command"]).startswith("agentgym train --config ")
    (tmp_path / "config.yaml").write_text("a: " + "[" * 200_000)
    assert "cannot be read" in str(run_settings(tmp_path)["reason"])


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ({"algo": "grpo"}, "train"),
        ({"algo": "own.py:loss"}, "train"),
        ({"algo": "sft"}, "sft"),
        ({"algo": "dpo"}, "dpo"),
        ({"kind": "eval"}, ""),
        ({}, ""),
    ],
)
def test_the_command_is_the_one_that_reads_the_settings(settings: dict[str, str], command: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(settings_text(settings), encoding="utf-8")
    card = {"digest": "0" * 32, "package": None, "version": None}
    (tmp_path / "environments.json").write_text(json.dumps({"own.py:Own": card}), encoding="utf-8")
    answer = run_settings(tmp_path)
    assert str(answer["command"]).split()[:2] == (["agentgym", command] if command else [])
    assert "None" not in str(answer["environments"]) and str(answer["made_with"]).startswith("['agentgym ")


def test_the_page_needs_nothing_else_and_runs_its_own_scripts_alone() -> None:
    page = app_page("</script><script>alert(1)//")
    assert page.text.count("<script") == page.text.count("</script>") and "alert(1)//" in page.text
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page.text)
    assert len(re.findall("sha256-", page.policy)) == page.text.count("<script>") + page.text.count("<style>")
    assert "innerHTML" not in "".join(path.read_text() for path in Path("agentgym/viewer/page/app").glob("*.js"))
