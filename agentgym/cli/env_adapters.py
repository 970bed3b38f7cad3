"""`agentgym env list --adapters` and `--namespace`: the environments of other libraries, by what is installed."""

from __future__ import annotations

from agentgym.cli.terminal import say, show_json, show_table
from agentgym.envs.adapters.namespaces import NAMESPACES
from agentgym.errors import ConfigError, UnknownName, nearest
from agentgym.types import JSON

__all__ = ["list_adapters"]


def list_adapters(namespace: str = "", *, as_json: bool = False) -> int:
    """Shows every namespace, or the ids of one."""
    if not namespace:
        return _list_all(as_json)
    if namespace not in NAMESPACES:
        near = nearest(namespace, NAMESPACES) or "."
        raise UnknownName(f"no namespace {namespace!r}{near} Known: {', '.join(NAMESPACES)}")
    ids = _ids(namespace)
    for env_id in ids:
        say(env_id)
    if as_json:
        show_json({"namespace": namespace, "ids": list[JSON](ids)})
    return 0


def _list_all(as_json: bool) -> int:
    rows: list[list[str]] = []
    namespaces: list[JSON] = []
    for name, namespace in NAMESPACES.items():
        try:
            ids, lacks = _ids(name), ""
        except ConfigError as error:  # its library is not installed
            ids, lacks = [], str(error)
        rows.append([f"{name}/", namespace.source, lacks or (str(len(ids)) if ids else "any"), namespace.example])
        namespaces.append(
            {"namespace": name, "source": namespace.source, "ids": list[JSON](ids), "lacks": lacks or None}
        )
    show_table(["namespace", "whose environments", "ids", "for example"], rows)
    say("The ids of one: agentgym env list --namespace NAME.  Play one: agentgym play NAMESPACE/NAME.")
    if as_json:
        show_json({"namespaces": namespaces})
    return 0


def _ids(namespace: str) -> list[str]:
    return [f"{namespace}/{name}" for name in NAMESPACES[namespace].names()]
