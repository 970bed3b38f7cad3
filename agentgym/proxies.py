"""The addresses of this machine, and the proxies that the environment names for all others."""

from __future__ import annotations

import base64
import ipaddress
import re
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment

from agentgym.errors import ConfigError

__all__ = ["is_loopback", "proxy_for", "proxy_options"]

ADDRESS = re.compile(r"https?://([^/@\s]*@)?(\[[^\]/@\s]+\]|[^/:@\s]+)(:\d+)?/?", re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server that listens on `host`."""
    with suppress(ValueError):  # it is a name
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def proxy_for(url: str) -> str | None:
    """Returns the proxy for requests to `url`, by HTTP_PROXY, HTTPS_PROXY and NO_PROXY (or lower case); None for none.

    This machine is always reached directly. NO_PROXY lists domains, addresses and networks (`10.0.0.0/8`), each with
    or without a port, or is `*`. Raises ConfigError for a proxy that does not speak HTTP.
    """
    parts, proxies = urlsplit(url), getproxies_environment()
    scheme, host = parts.scheme.lower().replace("ws", "http"), (parts.hostname or "").rstrip(".")
    proxy, exceptions = proxies.get(scheme, "").strip(), re.split(r"[,\s]+", proxies.get("no", "").lower())
    is_here = is_loopback(host) or host.endswith(".localhost") or host in ("0.0.0.0", "::")
    if not proxy or is_here or any(_covers(entry, host, parts.netloc.lower()) for entry in exceptions):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if not ADDRESS.fullmatch(proxy):
        name = f"{scheme.upper()}_PROXY is not the address of a proxy that speaks HTTP"
        raise ConfigError(f"{name}, such as http://HOST:PORT; NO_PROXY={host} reaches {host} without one")
    return proxy


def proxy_options(url: str) -> dict[str, Any]:
    """Returns the options of aiohttp's requests to `url` that name its proxy; empty for none.

    A password for a tunnel becomes a header, because aiohttp's errors about tunnels show the proxy's address.
    """
    proxy = proxy_for(url)
    if proxy is None:
        return {}
    secret = proxy.partition("://")[2].rpartition("@")[0]
    if not secret or url.lower().startswith(("http:", "ws:")):
        return {"proxy": proxy}
    token = base64.b64encode(unquote(secret).encode()).decode()
    return {"proxy": proxy.replace(f"{secret}@", ""), "proxy_headers": {"Proxy-Authorization": f"Basic {token}"}}


def _covers(entry: str, host: str, address: str) -> bool:
    """Returns whether an entry of NO_PROXY is about the host, or about its address, which may have a port."""
    name = entry.removeprefix("*").lstrip(".")
    with suppress(ValueError):  # not both are addresses
        return ipaddress.ip_address(host) in ipaddress.ip_network(name.strip("[]"), strict=False)
    return entry == "*" or (
        name != "" and any(f".{name_of_host}".endswith(f".{name}") for name_of_host in (host, address))
    )
