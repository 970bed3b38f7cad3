"""Checks by digests that the weights that an engine has are those that it was sent."""

from __future__ import annotations

from collections.abc import Mapping

from agentgym.errors import EngineError

__all__ = ["WeightCheck"]


class WeightCheck:
    """Compares an engine's digests of its parameters with those of the sent ones, update by update.

    If `is_exact`, the engine's digests are computed as ours are. Otherwise (a GPU hashes in its own way, and one rank
    of several has a share), what changed here must have changed there.
    """

    def __init__(self, engine: str, *, is_exact: bool) -> None:
        self.engine = engine
        self.is_exact = is_exact
        self._own_sums: Mapping[str, str] = {}
        self._server_sums: Mapping[str, str] = {}

    def compare(self, own_sums: Mapping[str, str], server_sums: Mapping[str, str], version: int) -> None:
        """Notes an update; raises EngineError that names the first parameter of `own_sums` that did not arrive."""
        last, before = self._own_sums, self._server_sums
        self._own_sums, self._server_sums = own_sums, server_sums
        if self.is_exact:
            stale = [name for name in own_sums if server_sums.get(name) != own_sums[name]]
        else:
            changed = [name for name in own_sums if name in last and last[name] != own_sums[name]]
            stale = [name for name in changed if server_sums.get(name) == before.get(name)]
        if stale:
            raise EngineError(
                f"stale weights: {len(stale)} of {len(own_sums)} tensors of {self.engine} are not those of version"
                f" {version}, the first is {stale[0]!r}: it was left out of the update, or altered on its way"
            )
