"""Parts of a cluster in this process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from agentgym.embedded import embedded_folder
from agentgym.trainers.config import TrainConfig


@pytest.fixture
def own_warnings() -> Iterator[None]:
    """Gives the log back that an actor takes for itself."""
    logger = logging.getLogger("agentgym")
    before = list(logger.handlers), logger.propagate
    yield
    logger.handlers, logger.propagate = before


@dataclass(frozen=True)
class Stored:
    """A parcel in this process, with a copy of the bytes as in the object store."""

    content: Any

    @classmethod
    def of(cls, content: Any) -> Stored:
        return cls(copy.deepcopy(content))

    async def open(self) -> Any:
        return self.content

    def take(self) -> Any:
        return self.content


@pytest.fixture
def parcels_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps in this process what would be in a cluster's object store."""
    from agentgym.trainers.cluster import weight_store

    monkeypatch.setattr(weight_store, "Parcel", Stored)


class _NoBoard:
    """A board whose warnings nobody reads."""

    def tell(self, method: Callable[..., object], *arguments: Any) -> None:
        """Takes a warning."""


@pytest.fixture
def begin_rank(own_warnings: None) -> Callable[..., Any]:
    """`begin_rank(config, folder)` begins the only rank of a learner in this process, with the weights of a folder.

    `kind` is a rank of something else.
    """

    def begin(config: TrainConfig, folder: Path, kind: str = "RankActor") -> Any:
        from agentgym.model.model_folder import decoder_config
        from agentgym.trainers.cluster import rank_actor
        from agentgym.trainers.cluster.node_files import ONE_NODE
        from agentgym.trainers.cluster.rank_process import RankSetup

        first = embedded_folder()
        rank = getattr(rank_actor, kind)("rank 0", cast(Any, _NoBoard()), 0, 1)
        rank.begin(RankSetup(config, str(folder), str(first), decoder_config(first).vocab_size, ONE_NODE))
        return rank

    return begin
