"""The viewer's page in a browser, by mouse and by keyboard: no text of a run acts, and every episode is found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.viewer import TokenTexts
from agentgym.viewer.served.run_view import RunView
from agentgym.viewer.served.server import ViewServer
from tests.viewer.chromium import Page, open_browser

pytestmark = pytest.mark.slow
MakeRun = Callable[..., Path]
TOKEN = "a-token-of-some-length"
TITLE = "document.querySelector('h1')?.innerText"


@pytest.fixture
def look(tmp_path: Path, vocabulary: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`look(act, run, ...)` serves the runs, and has `act(page, url)` use the page in a browser."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def serve(act: Callable[[Page, str], Awaitable[None]], *runs: Path) -> None:
        async def session() -> None:
            views = [RunView(run, lambda _: TokenTexts(vocabulary.text)) for run in runs]
            async with ViewServer(views, TOKEN) as server, open_browser(tmp_path / "profile") as page:
                await page.open(f"{server.url}/?token={TOKEN}")
                await page.until("document.querySelector('main h1')")
                await act(page, server.url)
                assert page.problems == []

        asyncio.run(session())

    return serve


def recorded(run: Path) -> dict[int, dict[str, Any]]:
    return dict(enumerate(map(json.loads, (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines()), 1))


def make_failing(make_run: MakeRun, name: str = "lamp-run") -> Path:
    """A run whose last evaluation fails three times of four, twice in one way."""
    run = make_run()
    lines = list(recorded(run).values())
    for line, text in zip(
        lines[-4:], ["The pearl is cursed.", "The red key is cursed.", "Too late.", "Won."], strict=True
    ):
        line["turns"][-1]["observation"] = line["turns"][-1]["tool_results"][0]["content"] = text
        line.update(success=text == "Won.", reward=float(text == "Won."))
    (run / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return run.rename(run.with_name(name))


def test_three_clicks_lead_to_why_an_episode_failed(look: Callable[..., None], make_run: MakeRun) -> None:
    run = make_failing(make_run)

    async def act(page: Page, url: str) -> None:
        assert not await page.evaluate("location.search"), "the token is not left in the address"
        groups = await page.until("document.querySelector('.causes')?.innerText")
        assert groups.split("\n")[:2] == ["2", "The … is cursed."]
        await page.click(".causes a", "is cursed")
        assert await page.until(f"{TITLE}?.includes('2 episodes') && {TITLE}")
        rows = await page.evaluate("[...document.querySelectorAll('tbody tr')].map((row) => row.innerText)")
        assert ["The pearl is cursed." in rows[0], "The red key is cursed." in rows[1], len(rows)] == [True, True, 2]
        await page.click("tbody tr", "red key")
        await page.until(f"{TITLE}?.startsWith('Episode 54')")
        chat = await page.evaluate("document.querySelector('.chat').innerText")
        assert chat.count("The red key is cursed.") == 1, "each result once"
        await page.click("button", "tokens")
        num_tokens = sum(len(span["ids"]) for span in recorded(run)[54]["rows"][0]["spans"])
        assert await page.until("document.querySelectorAll('.t').length") == num_tokens
        assert await page.evaluate("document.title") == "lamp-run · agentgym"
        assert await page.evaluate("document.querySelectorAll('img').length") == 0

    look(act, run)


def test_the_keyboard_alone_finds_reads_and_compares(look: Callable[..., None], make_run: MakeRun) -> None:
    run = make_failing(make_run)

    async def act(page: Page, url: str) -> None:
        await page.until("document.querySelector('.causes a')")
        for key in ("f", "Enter"):
            await page.press(key)
        await page.until(f"{TITLE}?.includes('2 episodes')")
        for key in ("j", "j", "Enter"):
            await page.press(key)
        await page.until(f"{TITLE}?.startsWith('Episode 54')")
        await page.press("k")
        await page.until(f"{TITLE}?.startsWith('Episode 53')")
        await page.press("t")
        await page.until("document.querySelector('.side')")  # a person looks before the next key
        for key in ("ArrowRight", "ArrowRight"):
            await page.press(key)
        await page.until("document.querySelector('.side dl')?.innerText.includes('PROMPT')")
        await page.press("c")
        await page.until("document.querySelector('.switch [aria-pressed=true]').innerText === 'logprob'")
        await page.press("h")
        await page.until(f"{TITLE}?.startsWith('One task over time') && document.querySelectorAll('article').length")
        for key in ("Escape", "Escape"):
            await page.press(key)
            await asyncio.sleep(0.2)
        await page.until(f"{TITLE}?.includes('2 episodes')")
        await page.press("e")
        await page.until(f"{TITLE}?.includes('56 episodes')")
        await page.press("?")
        await page.until("document.querySelector('dialog[open]')")
        await page.press("Escape")
        await page.until("!document.querySelector('dialog[open]')")
        await page.press("/")
        await page.type("pe")
        await page.evaluate("dispatchEvent(new Event('hashchange'))")  # as a run that goes on has the page drawn again
        await page.type("arl")
        await page.until(f"{TITLE}?.includes('1 episode')")
        await page.press("Tab")
        assert await page.evaluate("document.activeElement.tagName") == "SELECT"

    look(act, run)


def test_a_click_on_a_head_sorts_and_a_group_is_beside_itself(look: Callable[..., None], make_run: MakeRun) -> None:
    run = make_failing(make_run)
    (run / "config.yaml").write_text(f"model: {'long-name-' * 40}\n")
    lengths = {line: len(episode["turns"]) for line, episode in recorded(run).items()}

    async def act(page: Page, url: str) -> None:
        await page.press("e")
        order = "[...document.querySelectorAll('tbody tr a')].map((link) => Number(link.innerText)).join()"
        for direction, sign in (("ascending", 1), ("descending", -1)):
            await page.click("th button", "turns")
            await page.until(f"document.querySelector('th[aria-sort={direction}]')?.innerText.startsWith('turns')")
            order_of_lines = ",".join(map(str, sorted(lengths, key=lambda line, sign=sign: sign * lengths[line])))  # type: ignore[misc]
            await page.until(f"{order} === '{order_of_lines}'")
        await page.open(f"{url}/?token={TOKEN}#/0/group/5")
        await page.until("document.querySelectorAll('article').length === 2")
        rewards = {recorded(run)[line]["reward"] for line in (5, 6)}
        text = await page.evaluate("document.querySelector('main').innerText")
        assert ("this group has no signal" in text) == (len(rewards) == 1)
        for width, dark in ((400, True), (1440, False), (3840, False)):
            await page.resize(width, 900, dark=dark)
            for place in "overview episodes episode/5 episode/5?view=tokens group/5 task/5 settings".split():
                await page.evaluate(f"location.hash = '#/0/{place}'")
                await page.until("document.querySelector('main h1')")
                await page.until("!document.querySelector('main').innerText.includes('Loading')")
                assert await page.evaluate("document.documentElement.scrollWidth") <= width, place
                is_wide = "(table) => table.scrollWidth > table.clientWidth"
                assert not await page.evaluate(f"[...document.querySelectorAll('.table')].some({is_wide})"), place

    look(act, run)


def test_a_run_that_goes_on_is_shown_as_it_grows(look: Callable[..., None], make_run: MakeRun) -> None:
    run = make_failing(make_run)
    path = run / "episodes.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"eval_after") // 2])

    async def act(page: Page, url: str) -> None:
        await page.until("document.querySelector('.facts')")
        assert "56" not in await page.evaluate("document.querySelector('.facts').innerText")
        path.write_bytes(whole)
        await page.until("document.querySelector('.facts')?.innerText.includes('56')")

    look(act, run)


def make_tree(make_run: MakeRun) -> Path:
    """A run whose last episode has a fork, and a title that is in no loss; an agent's name is hostile."""
    run = make_run()
    *others, last = recorded(run).values()
    spans = last["rows"][0]["spans"]
    row = {"spans": [spans[0], {**spans[1], "excluded": "title"}], "messages": []}
    fork = {**row, "spans": [{"source": "prompt", "ids": spans[0]["ids"] + spans[1]["ids"]}, spans[1]]}
    client = "chat <img src=x onerror=alert(1)>\u202e"
    last["rows"] += [
        {**fork, "origin": {"label": "fork", "row": 0, "turn": 1, "num_shared": 3, "client": ""}},
        {**row, "origin": {"label": "title", "row": None, "turn": None, "num_shared": 0, "client": client}},
    ]
    last["turns"] += last["turns"][:2]
    lines = [*others, last]
    (run / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return run


def test_an_episode_shows_its_branches_and_why_a_token_is_in_no_loss(
    look: Callable[..., None], make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_tree(make_run)
    line = len(recorded(run))
    spans = recorded(run)[line]["rows"][0]["spans"]
    size, start = len(spans[1]["ids"]), len(spans[0]["ids"])

    async def act(page: Page, url: str) -> None:
        await page.open(f"{url}/#/{run.name}/episode/{line}")
        await page.until("document.querySelector('.branches')")
        cells = await page.evaluate(
            "[...document.querySelectorAll('.branches tbody tr')].map((r) => [...r.cells].map((td) => td.innerText))"
        )
        count = len(recorded(run)[line]["turns"]) - 2
        assert cells[0][:4] == ["0", "main", "–", f"0–{count - 1}"]
        assert cells[1] == [
            "1",
            "fork",
            "row 0, after turn 1",
            str(count),
            *map(str, (start + 2 * size, size, size)),
            "–",
            "–",
        ]
        costs = [str(start + size), str(size), "0", f"{size} title", "chat <img src=x onerror=alert(1)>\\u202e"]
        assert cells[2] == ["2", "title", "–", str(count + 1), *costs]
        assert ["row 1: fork", "row 2: title"] == await page.evaluate(
            "[...document.querySelectorAll('.chat .aside')].map((p) => p.innerText).filter((text) => /^row/.test(text))"
        )
        await page.resize(400, 900)  # each value is named beside it, since the head does not fit
        titles = "[...document.querySelectorAll('.branches tbody tr')].map((r) => r.cells[5].dataset.title)"
        assert await page.evaluate(titles) == ["sampled"] * 3
        await page.picture(tmp_path / "branches_400.png")
        await page.resize(1300, 900)
        await page.picture(tmp_path / "branches.png")
        await page.press("t")
        await page.until("document.querySelectorAll('.t').length")
        await page.evaluate("[...document.querySelectorAll('.t')].at(-1).click()")
        assert "no: title" in await page.until("document.querySelector('aside.side dl')?.innerText")
        await page.open(f"{url}/#/{run.name}/episode/{line - 1}")
        await page.until("document.querySelector('.facts')")
        assert not await page.evaluate("document.querySelectorAll('.branches').length")

    look(act, run)


def test_runs_are_beside_each_other_and_a_page_without_token_asks_for_it(
    look: Callable[..., None], make_run: MakeRun
) -> None:
    first, second = make_failing(make_run, "first"), make_failing(make_run, "second")
    for run, algo in ((first, "grpo"), (second, "rloo")):
        (run / "config.yaml").write_text(f"algo: {algo}\nsecret_key: hunter2\n")

    async def act(page: Page, url: str) -> None:
        await page.press("r")
        text = await page.until(
            "document.querySelectorAll('canvas').length > 1 && document.querySelector('main').innerText"
        )
        assert "rloo" in text and "hunter2" not in text
        await page.evaluate("localStorage.clear()")
        await page.open(url, "document.querySelector('form')")
        page.problems.clear()  # the browser reports the 401
        await page.click("input")
        await page.type(TOKEN)
        await page.press("Enter")
        await page.until("document.body?.dataset.ready && document.querySelector('main h1')")
        await page.open(url)
        await page.until("document.querySelector('main h1')")
        page.problems.clear()

    look(act, first, second)
