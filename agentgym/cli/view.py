"""`agentgym view`: shows runs in the browser, or writes one as an offline page."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from agentgym.cli.options import parse_options
from agentgym.cli.terminal import say, show_json
from agentgym.errors import ConfigError, RunFolderError
from agentgym.viewer import TokenText, TokenTexts, check_run_folder, read_run, write_page

__all__ = ["main"]

RUNS = Path("runs")
MAX_RUNS = 20


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Shows runs in the browser: why episodes fail, every episode, every token, runs beside each other."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[RUN ...]")] = ()
    """The run folders; by default, the newest ones in runs/."""
    port: int = 0
    """The port on this machine to serve the page at; 0 takes a free one."""
    browser: bool = True
    """Open the browser, if this is a terminal with a display. With --no-browser, or elsewhere, address and token are
    printed."""
    share: Annotated[Path | None, tyro.conf.arg(metavar="FILE.html")] = None
    """Write an offline page of the run in place of serving it; failures of the last evaluation are embedded first."""
    share_mb: float = 5.0
    """The megabytes that the episodes embedded in that page may have."""
    max_episodes: int = 200
    """The number of episodes embedded in that page, at most."""
    tokenizer: str | None = None
    """The model folder of these tokens; by default that of the run's config.yaml."""
    json: bool = False
    """Print one line of JSON, and all else on standard error; no browser is opened."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym view ...`."""
    options = parse_options(ViewOptions, args, prog="agentgym view")
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"a port is from 0 to 65535, got {options.port}")
    if options.share is not None:
        return _share(options, options.share)
    runs = options.runs or _newest_runs()
    for run in runs:
        check_run_folder(run)
    if options.tokenizer is not None:
        _token_texts(runs[0], options.tokenizer)  # reports a mistake before the browser is open
    try:
        asyncio.run(_serve(options, runs))
    except KeyboardInterrupt:
        say("Left.")
    return 0


async def _serve(options: ViewOptions, runs: Sequence[Path]) -> None:
    """Serves the runs until the process is interrupted."""
    # Here, and not above: help and mistakes need no server.
    from agentgym.http_guard import choose_token, shown_token
    from agentgym.viewer.served.run_view import RunView
    from agentgym.viewer.served.server import ViewServer

    token, opening_key = choose_token("127.0.0.1", is_required=True) or "", secrets.token_urlsafe(24)
    views = [RunView(run, lambda path: _token_texts(path, options.tokenizer)) for run in runs]
    async with ViewServer(views, token, port=options.port, opening_key=opening_key) as server:
        token_text = shown_token(token)
        say(f"the viewer is at {server.url}/?token={token_text}    (Ctrl-C ends it)")
        if options.json:
            show_json({"url": server.url, "token": token_text, "runs": [str(run) for run in runs]})
        # The key opens the page once: other users of the machine can read a program's arguments.
        key_url = f"{server.url}/?token={opening_key}"
        is_wanted = options.browser and not options.json and _has_display()
        if is_wanted and not await asyncio.to_thread(webbrowser.open, key_url):
            say("no browser could be opened: open the address in one yourself")
        await asyncio.Event().wait()


def _has_display() -> bool:
    has_screen = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    return sys.stdout.isatty() and has_screen


def _newest_runs() -> list[Path]:
    """Returns the run folders in runs/, the newest first."""
    paths: list[Path] = []
    for path in sorted(RUNS.iterdir(), key=lambda each: -each.stat().st_mtime) if RUNS.is_dir() else ():
        try:
            check_run_folder(path)
        except RunFolderError:
            continue
        paths.append(path)
    if not paths:
        raise RunFolderError("there is no run in runs/: name the folder of one, the --output of a train or eval run")
    return paths[:MAX_RUNS]


def _token_texts(run: Path, tokenizer: str | None) -> TokenTexts:
    """Returns the texts of a run's tokens, without a request to any address; `reason` says why there are none."""
    # Here, and not above: the page is served before the first token is looked at.
    from agentgym.chat_templates.tokenizer import ChatTokenizer
    from agentgym.cli.run_folder import model_folder_of_run, open_here

    folder, reason = open_here(model_folder_of_run, run, tokenizer)
    if folder is None:
        return TokenTexts(reason=reason or "no tokenizer is known; --tokenizer FOLDER (of the model) names it")
    text = TokenText(ChatTokenizer.load(folder, needs_template=False).backend)
    return TokenTexts(text, text.special_ids)


def _share(options: ViewOptions, file: Path) -> int:
    """Writes the offline page of a run."""
    if len(options.runs) != 1:
        raise ConfigError(f"--share writes the page of one run, got {len(options.runs)}: name its folder")
    if file.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--share writes a page, which a browser knows by its name: write {file.stem}.html")
    if options.share_mb <= 0 or options.max_episodes < 0:
        limits = f"{options.share_mb:g} and {options.max_episodes}"
        raise ConfigError(f"--share-mb is above 0 and --max-episodes at least 0, got {limits}")
    run = options.runs[0]
    data = read_run(run)  # reports a fault of the folder before one of its tokenizer
    texts = _token_texts(run, options.tokenizer)
    sizes = {"max_episodes": options.max_episodes, "max_bytes": int(options.share_mb * 1e6)}
    try:
        page = write_page(data, file, texts.decode, texts.special_ids, **sizes)
    except OSError as error:
        raise RunFolderError(f"cannot write {str(file)!r}: {error.strerror or error}") from error
    say(f"page: {page.path}, {page.num_embedded} of {page.num_episodes} episodes, {page.num_bytes / 1e6:.1f} MB")
    if page.num_embedded < page.num_episodes:
        say(f"  first the {page.num_failures} failures of the last evaluation; more with --share-mb and --max-episodes")
    if texts.reason:
        say(texts.reason)
        say("any token ids are shown as numbers")
    if options.json:
        show_json({"page": str(page.path), "episodes": page.num_episodes, "embedded": page.num_embedded})
    return 0
