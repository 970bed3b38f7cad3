"""The pages of the viewer's server: the application in one document, and what is answered without a token."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from agentgym.http_guard import HtmlPage
from agentgym.viewer.report import fill_page, text_hash

__all__ = ["app_page", "login_page"]

LIBRARIES = ("preact.min.umd.js", "hooks.umd.js", "htm.umd.js", "uPlot.iife.min.js")
SCRIPTS = (
    *("base.js", "plots.js", "table.js", "overview.js", "episode.js", "related.js", "compare.js", "settings.js"),
    "app.js",
)
STYLES = ("vendor/uPlot.min.css", "app/app.css")
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action {forms}; frame-ancestors 'none'"
)


def app_page(token: str) -> HtmlPage:
    """Returns the page of the application, which sends the token with what it asks for."""
    text, policy = _app()
    return HtmlPage(text.replace("@TOKEN@", json.dumps(token).replace("<", "\\u003c"), 1), policy)


@cache
def _app() -> tuple[str, str]:
    """Returns the page, which holds all scripts and styles, and the policy that lets these alone be used."""
    scripts = [_read(f"vendor/{name}") for name in LIBRARIES] + [_read(f"app/{name}") for name in SCRIPTS]
    styles = [_read(name) for name in STYLES]
    text = fill_page(
        _read("app/app.html"),
        {
            "@STYLES@": "".join(f"<style>{style}</style>\n" for style in styles),
            "@SCRIPTS@": "".join(f"<script>{script}</script>\n" for script in scripts),
        },
    )
    return text, POLICY.format(scripts=_hashes(scripts), styles=_hashes(styles), forms="'none'")


@cache
def login_page() -> HtmlPage:
    """Returns the page that is answered to a request without its token: it asks for it, or knows it from before."""
    script, style = _read("app/login.js"), _read("app/login.css")
    text = fill_page(_read("app/login.html"), {"@STYLE@": style, "@SCRIPT@": script})
    return HtmlPage(text, POLICY.format(scripts=_hashes([script]), styles=_hashes([style]), forms="'self'"))


def _hashes(texts: list[str]) -> str:
    return " ".join(f"'{text_hash(text)}'" for text in texts)


def _read(name: str) -> str:
    return (files("agentgym.viewer") / "page" / name).read_text(encoding="utf-8")
