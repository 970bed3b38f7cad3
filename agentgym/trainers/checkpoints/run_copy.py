"""A copy of a run's folder at an address of fsspec, such as s3://bucket/run, with which another machine resumes it.

Checkpoints and small files have the same paths as in the folder. A file that grows is in pieces, so that a step's lines
are sent once. `copy.json`, which is written last, lists the checkpoints and pieces that belong together: whatever is
interrupted, it names a state of the run that was whole.
"""

from __future__ import annotations

import json
import logging
import secrets
from pathlib import Path, PurePosixPath

from agentgym.errors import NOT_JSON, RunFolderError
from agentgym.remote import RemoteFolder
from agentgym.rollout.record.environments_file import ENVIRONMENTS
from agentgym.rollout.record.line_reader import FILE_NAME, PACKED_NAME
from agentgym.rollout.record.manifest import MANIFEST

__all__ = ["RECORDS", "RunCopy", "fetch_missing_run"]

logger = logging.getLogger(__name__)

RECORDS = ("metrics.jsonl", FILE_NAME, PACKED_NAME, "tools.jsonl")
"""The files of a run that grow with its steps."""
SMALL = (ENVIRONMENTS, "digests.json", "checkpoints/best", "config.yaml")
"""Further files; a folder with the last one holds a run."""
INDEX = "copy.json"


class RunCopy:
    """Sends what is new in a run's folder, in one thread at a time."""

    def __init__(self, run: Path, address: str) -> None:
        self.run = run
        self.remote = RemoteFolder(address)
        self._generation = secrets.token_hex(4)
        """Part of the names of pieces: those of an earlier process may hold lines that a resumed run dropped."""
        self._pieces: dict[str, list[str]] = {}
        self._marks: dict[str, int] = {}
        """The bytes sent of each growing file, and the time (ns) of any other or of a checkpoint's manifest."""

    def begin(self, *, is_new: bool) -> None:
        """Checks that the address can be written and holds no other run; raises RunFolderError otherwise.

        Nothing of a resumed run is replaced before its next checkpoint: its files still hold what it will drop.
        """
        index = self.remote.read(INDEX)
        if index is None:
            self._send_whole(self.run / "config.yaml")
            return
        if is_new:
            raise RunFolderError(
                f"{self.remote.address!r} already holds a run: go on with --resume, or give another address"
                " (checkpoint.copy_to)"
            )
        if self.remote.read("config.yaml") != (self.run / "config.yaml").read_bytes():
            raise RunFolderError(
                f"{self.remote.address!r} holds another run than {str(self.run)!r}: give another address"
                " (checkpoint.copy_to)"
            )
        self.remote.write(INDEX, index)

    def send(self) -> None:
        """Sends what is new; logs a failure as a warning, as the next call, also of a resumed run, sends the rest."""
        try:
            self._send()
        except RunFolderError as error:
            logger.warning(
                "the copy of the run is not up to date: %s. The next checkpoint, or --resume, tries again", error
            )

    def _send(self) -> None:
        checkpoints = sorted(path for path in (self.run / "checkpoints").glob("step-*") if (path / MANIFEST).is_file())
        for folder in checkpoints:
            self._send_checkpoint(folder)
        for name in SMALL:
            self._send_whole(self.run / name)
        for name in RECORDS:
            self._send_growth(name)
        names = [folder.name for folder in checkpoints]
        index = {"checkpoints": names, "pieces": self._pieces}
        self.remote.write(INDEX, json.dumps(index, indent=1).encode())
        listed_pieces = {piece for pieces in self._pieces.values() for piece in pieces}
        for path in self.remote.listing():
            is_gone = path.startswith("checkpoints/step-") and path.split("/")[1] not in names
            if is_gone or (path.startswith(tuple(f"{name}." for name in RECORDS)) and path not in listed_pieces):
                self.remote.delete(path)

    def _send_checkpoint(self, folder: Path) -> None:
        """Sends a checkpoint, unless its manifest, which is sent last, is there."""
        manifest, name = folder / MANIFEST, folder.relative_to(self.run).as_posix()
        if self._marks.get(name) == manifest.stat().st_mtime_ns:
            return
        if self.remote.read(f"{name}/{MANIFEST}") != manifest.read_bytes():
            for file in sorted(path for path in folder.rglob("*") if path.is_file() and path != manifest):
                self.remote.upload(file, file.relative_to(self.run).as_posix())
            self.remote.upload(manifest, f"{name}/{MANIFEST}")
        self._marks[name] = manifest.stat().st_mtime_ns

    def _send_whole(self, file: Path) -> None:
        if file.is_file() and self._marks.get(name := file.relative_to(self.run).as_posix()) != file.stat().st_mtime_ns:
            time = file.stat().st_mtime_ns
            self.remote.upload(file, name)
            self._marks[name] = time

    def _send_growth(self, name: str) -> None:
        file = self.run / name
        start, end = self._marks.get(name, 0), file.stat().st_size if file.is_file() else 0
        if end > start:  # it only grows while a run goes on
            piece = f"{name}.{self._generation}.{start:015d}"
            self.remote.upload(file, piece, start, end)
            self._pieces.setdefault(name, []).append(piece)
            self._marks[name] = end


def fetch_missing_run(run: Path, address: str | None) -> bool:
    """Copies the run at the address into a folder that holds none; returns whether it did.

    Raises RunFolderError if there is none at the address. Without an address nothing is done.
    """
    if address is None or (run / "config.yaml").is_file():
        return False
    remote = RemoteFolder(address)
    index = remote.read(INDEX)
    if index is None:
        raise RunFolderError(f"{str(run)!r} holds no run, and neither does {address!r}")
    try:
        contents = json.loads(index)
        checkpoints, pieces = [str(name) for name in contents["checkpoints"]], dict(contents["pieces"])
    except (*NOT_JSON, KeyError, TypeError) as error:
        raise RunFolderError(f"{INDEX} of {address!r} is torn ({error}): get it back from a copy") from error
    listed = remote.listing()
    for path in listed:
        if path.startswith("checkpoints/step-") and path.split("/")[1] in checkpoints:
            if ".." in PurePosixPath(path).parts:
                raise RunFolderError(f"{address!r} holds {path!r}, which leads out of the run's folder")
            remote.download(path, run / path)
    for name in RECORDS:
        for number, piece in enumerate(pieces.get(name, [])):
            remote.download(str(piece), run / name, append=number > 0)
    for name in SMALL:
        if name in listed:
            remote.download(name, run / name)
    return True
