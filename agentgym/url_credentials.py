"""Credentials are kept out of settings: no URL carries one, and keys are read from environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from urllib.parse import parse_qsl, urlsplit

from agentgym.errors import ConfigError

__all__ = ["SECRETS", "URL", "check_variable", "has_credentials", "read_key", "refuse_credentials"]

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
SECRETS = re.compile(
    r"(?:\A|[_.-])(?:api)?(?:key|token|secret|password|passwd|pwd|auth|sig|signature|credentials?)(?:\Z|[_.-])",
    re.IGNORECASE,
)


def refuse_credentials(settings: object, name: str = "") -> None:
    """Raises ConfigError for a URL with a user, a password or a key anywhere in the settings.

    Settings are a string, or a dataclass, mapping or sequence of settings. They are written to config.yaml, printed and
    logged, so a secret in a URL would be too. The error does not repeat it.

    >>> refuse_credentials({"url": "http://127.0.0.1:8000/v1?page=2"})
    """
    for setting, text in _texts(settings, name):
        for url in URL.findall(text):
            if credential := _credential(url):
                raise ConfigError(
                    f"the URL of {setting or 'a server'} holds {credential}. Settings are recorded and printed: give "
                    "the address alone; a key belongs into an environment variable: OPENAI_API_KEY for an endpoint, "
                    "AGENTGYM_SERVER_SECRET for a running SGLang or vLLM, OPENENV_API_KEY for an OpenEnv server"
                )


def check_variable(name: str) -> None:
    """Raises ConfigError, without repeating it, for what is not a name of a variable: it may be the key itself."""
    if name and not name.isidentifier():
        raise ConfigError("a key is named by its environment variable, such as OPENAI_API_KEY; this is no name of one")


def read_key(variable: str, *, default: str = "") -> str:
    """Returns the key that the environment variable holds, or "" if the variable is the `default` and is not set.

    Raises ConfigError for any other variable that is not set, for a key that no header can carry, and as
    `check_variable`.
    """
    check_variable(variable)
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the key in {variable} holds a character that no key has: set it again")
    if not key and variable != default:
        raise ConfigError(f"the environment variable {variable} is not set: export {variable}=KEY")
    return key


def has_credentials(url: str) -> bool:
    """Returns True for a URL with a user, a password or a key in it."""
    return bool(_credential(url))


def _credential(url: str) -> str:
    """Returns the kind of credential that the URL carries, or an empty string."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an address that cannot be read"
    if "@" in parts.netloc:
        return "a user or a password"
    for query in (parts.query, parts.fragment):
        for name, value in parse_qsl(query):
            if value and SECRETS.search(name):
                return f"a credential ({name!r:.40})"
    return ""


def _texts(settings: object, name: str) -> Iterator[tuple[str, str]]:
    """Yields the dotted name and the text of each string of the settings."""
    if isinstance(settings, str):
        yield name, settings
    elif isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from _texts(value, f"{name}.{key}".lstrip("."))
    elif isinstance(settings, list | tuple | set | frozenset):
        for value in settings:
            yield from _texts(value, name)
    elif is_dataclass(settings) and not isinstance(settings, type):
        for field in fields(settings):
            yield from _texts(getattr(settings, field.name), f"{name}.{field.name}".lstrip("."))
