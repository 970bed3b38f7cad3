"""`report.html`: one page that holds a run's curves, its episodes, and every token of those it embeds."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from agentgym.rollout.record.folder_digests import page_with_digest
from agentgym.rollout.record.line_reader import LineReader
from agentgym.rollout.record.manifest import replace_file
from agentgym.rollout.record.stored_fields import NO_EPISODE, check_stored_ids
from agentgym.types import JSON
from agentgym.viewer.metric_curves import EVALUATED, collapse_signs, metric_curves
from agentgym.viewer.run_data import EpisodeSummary, JSONObject, RunData, no_episode, objects, read_episode, read_run
from agentgym.viewer.token_text import looks_special, visible

__all__ = ["ReportPage", "choose", "fill_page", "text_hash", "write_page", "write_report"]

MAX_TABLE_ROWS = 20_000
SOURCES = ("prompt", "policy", "env")


@dataclass(frozen=True, slots=True)
class _Block:
    """One compressed piece of JSON in the page; base64 has no `<`, so no model text can end the element."""

    name: str
    text: str

    def to_html(self) -> str:
        return f'<script type="text/plain" id="{self.name}">{self.text}</script>\n'


@dataclass(frozen=True, slots=True)
class ReportPage:
    """A page that was written: its file, its size, and how many of the run's episodes it embeds."""

    path: Path
    num_bytes: int
    num_episodes: int
    num_embedded: int
    num_failures: int
    """The failures of the last evaluation; they are embedded before others."""


def write_report(
    run: Path | RunData,
    *,
    decode_token: Callable[[int], str] | None = None,
    special_ids: Collection[int] = (),
    max_episodes: int = 200,
    max_bytes: int = 5_000_000,
) -> Path:
    """Writes `report.html` into the run folder and returns its path; see `write_page`."""
    data = run if isinstance(run, RunData) else read_run(run)
    texts = (decode_token, special_ids)
    return write_page(data, data.path / "report.html", *texts, max_episodes=max_episodes, max_bytes=max_bytes).path


def write_page(
    data: RunData,
    path: Path,
    decode_token: Callable[[int], str] | None = None,
    special_ids: Collection[int] = (),
    *,
    max_episodes: int = 200,
    max_bytes: int = 5_000_000,
) -> ReportPage:
    """Writes the page of a run into the file `path`; the page needs no network and no other file.

    `decode_token` gives the text of one id (a `TokenText`); without it the page shows ids. Tokens in
    `special_ids`, and those that look like a chat format's marks, are shown as special. At most `max_episodes`
    episodes are embedded token by token, in at most `max_bytes` of the page together, failures of the last evaluation
    first; the page says how many were left out. Raises RunFolderError for an episode that is damaged.
    """
    failures = last_failures(data.episodes)
    blocks, token_ids = _episode_blocks(data, choose(data.episodes, max_episodes), max_bytes, failures)
    texts = {token_id: decode_token(token_id) if decode_token else f"⟨{token_id}⟩" for token_id in sorted(token_ids)}
    special = [i for i, text in texts.items() if i in special_ids or (decode_token and looks_special(text))]
    name = data.path.resolve().name
    embedded = {int(block.name[1:]) for block in blocks}
    overview: dict[str, JSON] = {
        "run": name,
        "curves": metric_curves(data.metrics, EVALUATED if data.evaluations else ()),
        "signs": collapse_signs(data.metrics),
        "evaluations": [
            {"phase": p.phase, "step": p.step, "success": p.success, "reward_mean": p.reward_mean, "n": p.num_episodes}
            for p in data.evaluations
        ],
        "at_k": list(data.at_k),
        "episodes": _table(data.episodes, embedded),
        "first": next((line for line in failures if line in embedded), None),
        "num_episodes": len(data.episodes),
        "num_embedded": len(blocks),
        "num_failed": sum(episode.has_failed for episode in data.episodes),
        "texts": {str(token_id): visible(text) for token_id, text in texts.items()},
        "special": special,
    }
    page = page_with_digest(_page(name, [_block("overview", overview), *blocks]))
    replace_file(path, page)
    return ReportPage(path, len(page.encode()), len(data.episodes), len(blocks), len(failures))


def last_failures(episodes: Sequence[EpisodeSummary]) -> list[int]:
    """Returns the lines of the episodes of the last evaluation that did not succeed."""
    last = next(((e.phase, e.step) for e in reversed(episodes) if e.phase.startswith("eval")), None)
    return [e.line for e in episodes if (e.phase, e.step) == last and not e.success]


def choose(episodes: Sequence[EpisodeSummary], limit: int) -> list[EpisodeSummary]:
    """Returns the episodes to embed, in file order.

    They are the failures of the last evaluation, then those without a reward (at most half of the rest), the first and
    last step of each phase (at most half of the rest), and the others evenly over the run.
    """
    if len(episodes) <= limit:
        return list(episodes)
    ends: dict[str, tuple[int, int]] = {}
    for episode in episodes:
        first, last = ends.get(episode.phase, (episode.step, episode.step))
        ends[episode.phase] = (min(first, episode.step), max(last, episode.step))
    failures = {*last_failures(episodes)}
    chosen = {e.line: e for e in _evenly([e for e in episodes if e.line in failures], limit)}
    failed = [e for e in episodes if e.has_failed and e.line not in chosen]
    chosen.update({e.line: e for e in _evenly(failed, (limit - len(chosen)) // 2)})
    edges = [e for e in episodes if e.line not in chosen and e.step in ends[e.phase]]
    chosen.update({e.line: e for e in _evenly(edges, (limit - len(chosen)) // 2)})
    others = [e for e in episodes if e.line not in chosen]
    chosen.update({e.line: e for e in _evenly(others, limit - len(chosen))})
    return [chosen[line] for line in sorted(chosen)]


def _evenly(items: Sequence[EpisodeSummary], count: int) -> list[EpisodeSummary]:
    if len(items) <= count:
        return list(items)
    return [items[position * len(items) // count] for position in range(count)]


def _episode_blocks(
    data: RunData, chosen: Sequence[EpisodeSummary], max_bytes: int, first: Collection[int]
) -> tuple[list[_Block], set[int]]:
    """Returns the embedded episodes within the page's size, the lines `first` before others, and all their ids."""
    blocks: list[_Block] = []
    token_ids: set[int] = set()
    num_bytes = 0
    if not chosen:
        return blocks, token_ids
    # The size limit may cut the list short, so the episodes are taken in an order that stays spread over the run.
    firsts = {*first}
    order = sorted(range(len(chosen)), key=lambda p: (chosen[p].line not in firsts, bin(p)[:1:-1], p))
    with LineReader(data.episodes_path) as lines:
        for position in order:
            line = chosen[position].line
            try:
                record, ids = _compact(read_episode(lines, chosen[position]))
                block = _block(f"e{line}", record)
            except NO_EPISODE as error:
                raise no_episode(data.episodes_path, line, error) from error
            if num_bytes + len(block.text) > max_bytes:
                continue
            num_bytes += len(block.text)
            blocks.append(block)
            token_ids |= ids
    return sorted(blocks, key=lambda block: int(block.name[1:])), token_ids


def _compact(record: JSONObject) -> tuple[JSONObject, set[int]]:
    """Returns an episode in the page's form: spans as [source, ids, logprobs, versions, why excluded]."""
    rows: list[JSON] = []
    token_ids: set[int] = set()
    for row in objects(record["rows"]):
        spans: list[JSON] = []
        for span in objects(row["spans"]):
            ids = span["ids"]
            check_stored_ids(ids)
            assert isinstance(ids, list)
            token_ids.update(ids)
            source = SOURCES.index(str(span["source"]))
            logprobs, reason = _round_values(span.get("logprobs"), 4), str(span.get("excluded") or "")
            spans.append([source, ids, logprobs, span.get("policy_versions"), reason])
        rows.append(spans)
    advantages = record.get("advantages")
    keys = ("task", "turns", "metrics", "error", "info", "group", "member")
    compact: dict[str, JSON] = {key: record.get(key) for key in keys}
    compact["rows"] = rows
    compact["advantages"] = [_round_values(row, 5) for row in advantages] if isinstance(advantages, list) else None
    return compact, token_ids


def _round_values(values: JSON, digits: int) -> JSON:
    if not isinstance(values, list):
        return None
    return [round(float(value), digits) for value in values]


def _table(episodes: Sequence[EpisodeSummary], embedded: set[int]) -> list[JSON]:
    """Returns the table's rows; when there are too many, the embedded ones and others evenly."""
    rows = list(episodes)
    if len(rows) > MAX_TABLE_ROWS:
        others = _evenly([e for e in rows if e.line not in embedded], MAX_TABLE_ROWS - len(embedded))
        rows = sorted([*(e for e in rows if e.line in embedded), *others], key=lambda episode: episode.line)
    return [
        [
            e.line, e.phase, e.step, e.group, e.member, e.env_id, e.status, e.stop_reason, e.reward, e.success,
            e.num_turns, e.num_tokens, e.num_sampled_tokens, e.num_malformed_calls, int(e.line in embedded),
        ]
        for e in rows
    ]  # fmt: skip


def _block(name: str, record: JSONObject) -> _Block:
    raw = json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=str)
    packed = gzip.compress(raw.encode("utf-8", "backslashreplace"), compresslevel=9, mtime=0)
    return _Block(name, base64.b64encode(packed).decode("ascii"))


def _page(name: str, blocks: Sequence[_Block]) -> str:
    """Fills the template with style, script and data; only our own script, known by its hash, may run."""
    folder = files("agentgym.viewer") / "page"
    style, script = ((folder / file).read_text(encoding="utf-8") for file in ("report.css", "report.js"))
    parts = {
        "@NAME@": html.escape(name),
        "@STYLE@": style,
        "@STYLE_HASH@": text_hash(style),
        "@SCRIPT@": script,
        "@SCRIPT_HASH@": text_hash(script),
        "@DATA@": "".join(block.to_html() for block in blocks),
    }
    return fill_page((folder / "report.html").read_text(encoding="utf-8"), parts)


def fill_page(template: str, parts: Mapping[str, str]) -> str:
    """Returns the page with its parts, which the template names between two `%%`."""
    return "".join(parts.get(piece, piece) for piece in template.split("%%"))


def text_hash(text: str) -> str:
    """Returns the hash by which a content security policy knows a script or a style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
