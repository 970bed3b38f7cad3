"""`digests.json`: the digests of a folder's files at the end of the run, so that a tail lost later is detected."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from agentgym.errors import RunFolderError
from agentgym.rollout.record.manifest import MANIFEST, replace_file

__all__ = [
    "DIGESTS",
    "discard_digests",
    "file_digest",
    "page_problem",
    "page_with_digest",
    "read_digests",
    "run_digest",
    "write_digests",
]

DIGESTS = "digests.json"
RUN = "run"
_PAGE_END = re.compile(rb"<!-- digest ([0-9a-f]{32}) -->\n\Z")


def file_digest(path: Path) -> str:
    """Returns a 16-byte BLAKE2b digest, in hex, of a file's bytes."""
    with open(path, "rb") as file:
        digest = blake2b(digest_size=16)
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def run_digest(digests: Mapping[str, str]) -> str:
    """Returns the digest of a whole run: over the digests of its parts by name, in any order.

    >>> run_digest({"config.yaml": "00"})
    '4bbd5eb2ebbd9a3958ab802593d3af23'
    """
    parts = {name: digest for name, digest in digests.items() if name != RUN}
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return _digest(text.encode("ascii"))


def write_digests(folder: Path, heads: Mapping[str, str], files: tuple[str, ...]) -> None:
    """Writes `digests.json` whole or not at all.

    It has the `heads` of chained files by name, the digests of `files`, those of the manifests of all checkpoints, and
    under `run` the digest of all of these.

    Example: {"config.yaml": "5c1d...", "episodes.jsonl": "90ab...", "checkpoints/step-000020/manifest.json": "77e0...",
    "run": "1f3b..."}
    """
    manifests = sorted(folder.glob(f"checkpoints/step-*/{MANIFEST}"))
    paths = {path.relative_to(folder).as_posix(): path for path in [*(folder / name for name in files), *manifests]}
    digests = {**heads, **{name: file_digest(path) for name, path in paths.items()}}
    replace_file(folder / DIGESTS, json.dumps({**digests, RUN: run_digest(digests)}, indent=1) + "\n")


def read_digests(folder: Path) -> dict[str, str] | None:
    """Returns the digests of a run that ended, with that of all under `run`; None if there is no such file.

    Raises RunFolderError if the file cannot be read or its parts do not have the digest under `run`.
    """
    path = folder / DIGESTS
    try:
        value = json.loads(path.read_bytes())
        digests = {str(name): str(digest) for name, digest in value.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise RunFolderError(f"{DIGESTS} cannot be read: {error}") from error
    if digests.get(RUN) != run_digest(digests):
        raise RunFolderError(f"{DIGESTS} is not as it was written: its parts do not have the digest under {RUN!r}")
    return digests


def discard_digests(folder: Path) -> None:
    """Removes the digests of a run that continues; they are written again when it ends."""
    (folder / DIGESTS).unlink(missing_ok=True)


def page_with_digest(page: str) -> str:
    """Returns an HTML page followed by a comment with the digest of the page."""
    return f"{page}<!-- digest {_digest(page.encode())} -->\n"


def page_problem(page: bytes) -> str | None:
    """Returns why a page is not as it was written, "" if it is; None if it has no digest to compare with."""
    match = _PAGE_END.search(page)
    if match is None:
        return None if page.rstrip().endswith(b"</html>") else "the page is cut: it does not end with its digest"
    is_same = match.group(1).decode("ascii") == _digest(page[: match.start()])
    return "" if is_same else "the page is not as it was written"


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
