"""Folders and names of the Hugging Face `datasets` library; the only file that imports it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import datasets

from agentgym.data.parquet import own_cells, struct_keys
from agentgym.data.table import Table
from agentgym.errors import ConfigError, nearest

__all__ = ["open_dataset", "own_rows"]


def open_dataset(name: str, parts: Sequence[str] = (), limit: int | None = None) -> Table:
    """Opens the first `limit` rows of a split of a data set.

    `name` is a folder (of `save_to_disk`, or with data files that the library knows), or a name that the library finds
    in its cache or downloads; `parts` are the split, or the configuration and the split. Raises ConfigError if there is
    no such data set, or if there are several splits and none is named.
    """
    if len(parts) > 2:
        raise ConfigError(f"a data set is NAME, NAME:SPLIT or NAME:CONFIG:SPLIT, got {':'.join([name, *parts])!r}")
    label, split = ":".join([name, *parts]), parts[-1] if parts else None
    dataset = _load(name, parts[0] if len(parts) == 2 else None)
    if isinstance(dataset, dict):  # a DatasetDict
        if split is None and len(dataset) > 1:
            raise ConfigError(f"{name!r} has the splits {', '.join(dataset)}; say which: {name}:{next(iter(dataset))}")
        split_name = split or next(iter(dataset))
        if split_name not in dataset:
            near = nearest(split_name, dataset) or "."
            raise ConfigError(f"{name!r} has no split {split_name!r}{near} It has {', '.join(dataset)}")
        dataset = dataset[split_name]
    elif split is not None:
        raise ConfigError(f"{name!r} is one data set without splits: leave ':{split}' out")
    if not dataset.num_rows:
        raise ConfigError(f"{label!r} has the columns {', '.join(dataset.column_names) or 'none'} and no rows")

    def read(columns: Sequence[str]) -> Iterator[tuple[int, dict[str, object]]]:
        yield from islice(enumerate(own_rows(dataset.select_columns(list(columns)))), limit)

    schema = dataset.features.arrow_schema
    return Table(name=label, columns=tuple(dataset.column_names), read=read, keys=struct_keys(schema))


def own_rows(dataset: datasets.Dataset | datasets.IterableDataset) -> Iterator[dict[str, object]]:
    """Yields the rows of a data set as they were before Arrow; see `own_cells`."""
    schema = dataset.features.arrow_schema if dataset.features else None
    for row in dataset.with_format(None):
        yield row if schema is None else own_cells(row, schema, json_as_text=False)


def _load(name: str, config: str | None) -> datasets.Dataset | datasets.DatasetDict:
    try:
        saved = any(Path(name, file).is_file() for file in ("state.json", "dataset_dict.json"))
        return datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"the datasets library cannot load {name!r}: {line}") from error
