"""The page as a browser runs it: it draws every token, obeys its keys, and lets no model text act."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.viewer import write_report

pytestmark = pytest.mark.slow

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--enable-logging=stderr", "--virtual-time-budget=8000", "--window-size=1280,900",
)  # fmt: skip
DRIVE = """
const seen = {};
const press = (key) => document.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
const settled = (wanted) => new Promise((done) => {
  const look = () => (wanted() ? done() : setTimeout(look, 20));
  look();
});
const text = (id) => document.getElementById(id).textContent;
(async () => {
  await settled(() => document.body.dataset.ready);
  const first = text('title');
  press('j');
  await settled(() => text('title') !== first);
  seen.second = text('title');
  press('k');
  await settled(() => text('title') === first);
  seen.first = text('title');
  press('c');
  seen.colour = document.querySelector('#colour [aria-checked=true]').textContent;
  document.querySelector('.t.s1').click();
  seen.side = text('side');
  document.getElementById('filters').status.value = 'env_error';
  document.getElementById('filters').dispatchEvent(new Event('input'));
  seen.failed = [...document.querySelectorAll('#rows tr')].map((row) => Number(row.dataset.line));
  const out = document.createElement('pre');
  out.id = 'seen';
  out.textContent = JSON.stringify(seen);
  document.body.append(out);
})();
"""


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """`browse(page, "#episode=3")` gives the DOM after scripts ran, and what the browser logged."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium: CI installs it (`apt-get install chromium`)")
        pytest.skip("no chromium is installed; `apt-get install chromium` brings it")

    def run(page: Path, fragment: str = "") -> tuple[str, str]:
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        command = [chromium, *FLAGS, profile, "--dump-dom", f"{page.as_uri()}{fragment}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)

    return run


def shown_tokens(dom: str) -> list[tuple[int, str]]:
    """Source and text of each token on the page, in order."""
    spans = re.findall(r'<span class="t s(\d)[^>]*>([^<]*)</span>', dom)
    return [(int(source), html.unescape(text)) for source, text in spans]


def test_the_page_draws_each_token_and_no_text_acts(
    make_run: Callable[..., Path], vocabulary: Any, browse: Callable[..., tuple[str, str]]
) -> None:
    run = make_run()
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines()]
    line, episode = next((n, episode) for n, episode in enumerate(episodes, 1) if len(episode["turns"]) == 5 and n > 4)
    dom, console = browse(write_report(run, decode_token=vocabulary.text), f"#episode={line}")
    assert console == ""
    assert 'data-ready="yes"' in dom
    assert "<title>lamp-run · agentgym</title>" in dom and "<img" not in dom
    spans = episode["rows"][0]["spans"]
    expected = [("prompt", "policy", "env").index(span["source"]) for span in spans for _ in span["ids"]]
    tokens = shown_tokens(dom)
    assert [source for source, _ in tokens] == expected
    assert "alert" in "".join(text for _, text in tokens), "the hostile text is there, as text"
    assert dom.count('class="chart"') == 9 + 6


def test_a_number_between_gaps_is_drawn(make_run: Callable[..., Path], browse: Callable[..., tuple[str, str]]) -> None:
    run = make_run(num_steps=3)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for number in (0, 2):
        steps[number]["entropy"] = None
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")
    dom, console = browse(write_report(run))
    chart = dom.partition('aria-label="Entropy"')[2].partition("</svg>")[0]
    assert console == "" and re.search(r'd="M[\d.]+ [\d.]+m-3 0h6"', chart)


def test_repeats_of_an_evaluation_are_a_table(
    make_run: Callable[..., Path], browse: Callable[..., tuple[str, str]]
) -> None:
    run = make_run()
    assert '<section id="repeats" hidden' in browse(write_report(run))[0]
    rates = {"pass_at_k": 0.75, "pass_at_k_interval": [0.5, 0.9], "pass_hat_k": 0.0, "pass_hat_k_interval": [0.0, 0.2]}
    numbers = {**rates, "best_at_k": 1.5, "best_at_k_interval": None}
    at = [{"k": k, "num_tasks": 3, "num_short": k - 1, **numbers} for k in (1, 2)]
    scores = {"env": None, "difficulty": "<b>hard</b>", "num_tasks": 3, "num_episodes": 6, "num_failed": 0, "k": at}
    (run / "result.json").write_text(json.dumps({"at_k": [scores]}), encoding="utf-8")
    dom, console = browse(write_report(run))
    assert console == "" and '<section id="repeats">' in dom
    assert "all, difficulty &lt;b&gt;hard&lt;/b&gt;: 3" in dom
    assert "<td>0.75 [0.5, 0.9]</td><td>0 [0, 0.2]</td><td>1.5</td>" in dom
    assert "tasks with fewer episodes: 1" in dom


@pytest.mark.parametrize("excluded", ["", "unused"])
def test_keys_filters_and_the_side_panel_work(
    make_run: Callable[..., Path], vocabulary: Any, browse: Callable[..., tuple[str, str]], excluded: str
) -> None:
    run = make_run()
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines()]
    for span in (span for episode in episodes for row in episode["rows"] for span in row["spans"]):
        span |= {"excluded": excluded} if excluded and span["source"] == "policy" else {}
    (run / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in episodes), encoding="utf-8")
    page = write_report(run, decode_token=vocabulary.text)
    text = page.read_text(encoding="utf-8")
    driven = run / "driven.html"
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')  # it rightly refuses the test's script
    driven.write_text(policy.sub("", text).replace("</body>", f"<script>{DRIVE}</script></body>"), encoding="utf-8")
    dom, console = browse(driven, "#episode=1")
    assert console == ""
    match = re.search(r'<pre id="seen">(.*?)</pre>', dom, re.DOTALL)
    assert match is not None, dom[-500:]
    seen = json.loads(html.unescape(match[1]))
    assert (seen["first"], seen["second"], seen["colour"]) == ("Episode 1", "Episode 2", "logprob")
    trained = f"no: {excluded}" if excluded else "yes"
    assert re.search(rf"POLICY.*trained{trained}.*logprob-\d.*policy version0", seen["side"])
    assert seen["failed"] == [n for n, episode in enumerate(episodes, 1) if episode["status"] == "env_error"] != []


def test_a_damaged_episode_is_still_shown(
    make_run: Callable[..., Path], browse: Callable[..., tuple[str, str]]
) -> None:
    run = make_run()
    lines = (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    damaged = json.loads(lines[0])
    damaged["turns"].pop()
    damaged["rows"][0]["spans"][1]["logprobs"].pop()
    (run / "episodes.jsonl").write_text("\n".join([json.dumps(damaged), *lines[1:]]) + "\n", encoding="utf-8")
    dom, console = browse(write_report(run))
    assert console == "" and "no turn is recorded for this reply" in dom
    assert len(shown_tokens(dom)) == sum(len(span["ids"]) for span in damaged["rows"][0]["spans"])


def test_a_script_that_is_not_the_page_s_own_is_refused(
    make_run: Callable[..., Path], browse: Callable[..., tuple[str, str]]
) -> None:
    page = write_report(make_run())
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", "<script>document.title = 'owned'</script></body>"), encoding="utf-8")
    dom, console = browse(page)
    assert "owned</title>" not in dom and "Content Security Policy" in console


def test_an_episode_without_ids_is_shown_as_text(
    make_run: Callable[..., Path], browse: Callable[..., tuple[str, str]]
) -> None:
    run = make_run()
    lines = (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    episode = json.loads(lines[0])
    opening = [{"role": "system", "content": "Find the <b>lamp</b>."}, {"role": "user", "content": "You stand here."}]
    episode.update(rows=[], advantages=None, info={"chat_endpoint": {"token_ids": False, "opening": opening}})
    (run / "episodes.jsonl").write_text(json.dumps(episode) + "\n", encoding="utf-8")
    dom, console = browse(write_report(run))
    assert console == "" and shown_tokens(dom) == []
    assert "a chat endpoint that returns none played this episode" in dom and "cannot be trained on" in dom
    assert "Find the &lt;b&gt;lamp&lt;/b&gt;." in dom and "You stand here." in dom
    assert dom.count("I look.") == len(episode["turns"]) and "NaN" not in dom
