"""Every setting of a training run is explained on a page of the docs, and read from what config.yaml holds of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from agentgym.settings.config_class import config_from_mapping
from agentgym.trainers.config import TrainConfig

ROOT = Path(__file__).parents[3]
CONFIG = TrainConfig(env="TextGame-v0")
STORED = json.loads(json.dumps(asdict(CONFIG)))
SPAN = re.compile(r"`[^`\n]+`|^    .*$", re.MULTILINE)
"""Code within a line, or a line of code."""


def names_of(settings: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yields the settings with their blocks: `limits.max_turns`."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from names_of(value, f"{where}{name}.")
        else:
            yield where + name


def named_in_code(page: Path) -> str:
    """Returns the code of a page with settings as Python writes them: `limits.max_turns` for `--limits.max-turns`."""
    code = "\n".join(SPAN.findall(page.read_text(encoding="utf-8")))
    return code.replace("--", " ").replace("-", "_").replace(".no_", ".")


def is_explained(setting: str, pages: list[str]) -> bool:
    """True if a page names the setting with its block, or the block and the setting."""
    *blocks, last = setting.split(".")

    def names(page: str, name: str) -> bool:
        return re.search(rf"(?<![\w.]){re.escape(name)}\b", page) is not None

    whole = [setting, ".".join([*blocks[-1:], last])]
    return any(
        any(names(page, name) for name in whole)
        or (bool(blocks) and names(page, ".".join(blocks[-2:])) and names(page, last))
        for page in pages
    )


def test_every_setting_is_explained_on_a_page() -> None:
    pages = [named_in_code(page) for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]]
    assert [setting for setting in names_of(STORED) if not is_explained(setting, pages)] == []


def test_every_setting_is_read_from_what_config_yaml_holds_of_it() -> None:
    assert config_from_mapping(TrainConfig, yaml.safe_load(yaml.safe_dump(STORED))) == CONFIG
