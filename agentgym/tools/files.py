"""The tools `view`, `create`, `str_replace`, `insert` and `list`: text files in an episode's own folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentgym.errors import ConfigError, ToolFailure
from agentgym.tools.calling.definition import Tool, as_tool, tool
from agentgym.tools.scratch import Scratch

__all__ = ["FileTools"]

SHOWN_AROUND = 3
"""The number of lines shown before and after a change."""


class FileTools:
    """Gives an environment tools to edit text files: `tool_sources=[FileTools]`.

    The folder is created when the episode begins, with `files` in it, and removed when it ends. Paths cannot leave it
    (`Scratch`). The model reads why a call cannot be done.
    """

    def __init__(
        self,
        *,
        files: Mapping[str, str] | None = None,
        max_file_bytes: int = 256_000,
        max_total_bytes: int = 4_000_000,
        max_files: int = 200,
    ) -> None:
        """`files` maps paths to the texts that are there from the start. The limits are the folder's."""
        for name, limit in (("max_file_bytes", max_file_bytes), ("max_total_bytes", max_total_bytes)):
            if limit < 1:
                raise ConfigError(f"{name} must be at least 1, got {limit!r}")
        if max_files < 1:
            raise ConfigError(f"max_files must be at least 1, got {max_files!r}")
        self._files = dict(files or {})
        self._limits = (max_file_bytes, max_total_bytes, max_files)
        self._scratch: Scratch | None = None

    def open(self) -> Sequence[Tool]:
        """Creates the folder."""
        self._scratch = Scratch(*self._limits)
        for path, text in self._files.items():
            try:
                self._scratch.write(path, text.encode(), new=True)
            except ToolFailure as error:
                raise ConfigError(f"FileTools cannot begin with the file {path!r}: {error}") from None
        return [as_tool(fn) for fn in (self.view, self.create, self.str_replace, self.insert, self.list)]

    def close(self) -> None:
        """Removes the folder."""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    @property
    def folder(self) -> str:
        """The folder of the files, for an environment that inspects the result; "" outside of an episode."""
        return "" if self._scratch is None else self._scratch.folder

    def read(self, path: str) -> str:
        """Returns a file's text, for an environment that inspects the result; raises ToolFailure as `view` does."""
        return self._text(path)

    @tool
    def view(self, path: str, first_line: int = 1, last_line: int | None = None) -> str:
        """Shows a text file with line numbers.

        Args:
            path: The file, such as notes/plan.txt.
            first_line: The first line to show, counted from 1.
            last_line: The last line to show; left out, the file's last.
        """
        lines = _lines(self._text(path))
        last = len(lines) if last_line is None else min(last_line, len(lines))
        if not lines:
            return "(the file is empty)"
        if not 1 <= first_line <= len(lines) or last < first_line:
            raise ToolFailure(f"{path!r} has lines 1 to {len(lines)}; {first_line} to {last} were asked for")
        return _number_lines(lines, first_line, last)

    @tool
    def create(self, path: str, text: str) -> str:
        """Writes a new text file. Folders on the way to it are made.

        Args:
            path: The file; it must not be there yet.
            text: What it holds.
        """
        self._write(path, text, new=True)
        return f"{path} is written: {len(_lines(text))} lines"

    @tool
    def str_replace(self, path: str, old: str, new: str) -> str:
        """Replaces a piece of a text file that occurs exactly once.

        Args:
            path: The file.
            old: The piece, to the letter, with enough around it to be the only one.
            new: What stands in its place.
        """
        text = self._text(path)
        count = text.count(old) if old else 0
        if count != 1:
            reason = f"occurs {count} times" if count else "does not occur" if old else "is empty"
            raise ToolFailure(f"nothing was changed: the piece to replace {reason} in {path!r}; it must occur once")
        begin = text.index(old)
        self._write(path, text[:begin] + new + text[begin + len(old) :], new=False)
        return self._around(path, text[:begin].count("\n") + 1, new.count("\n") + 1)

    @tool
    def insert(self, path: str, after_line: int, text: str) -> str:
        """Inserts lines into a text file.

        Args:
            path: The file.
            after_line: The line after which they go; 0 puts them first.
            text: The lines.
        """
        lines = _lines(self._text(path))
        count = len(_lines(text)) or 1
        if not 0 <= after_line <= len(lines):
            raise ToolFailure(f"nothing was changed: {path!r} has {len(lines)} lines, so no line {after_line}")
        text = "\n".join([*lines[:after_line], *(_lines(text) or [""]), *lines[after_line:]])
        self._write(path, f"{text}\n", new=False)
        return self._around(path, after_line + 1, count)

    @tool
    def list(self, path: str = "") -> str:
        """Shows files and folders, with sizes.

        Args:
            path: A folder; left out, all that is there.
        """
        return "\n".join(self._require_scratch().names(path)) or "(nothing is there)"

    def _around(self, path: str, first: int, count: int) -> str:
        lines = _lines(self._text(path))
        excerpt = _number_lines(lines, max(1, first - SHOWN_AROUND), min(len(lines), first + count - 1 + SHOWN_AROUND))
        return f"{path} is changed:\n{excerpt}" if excerpt else f"{path} is changed, and empty now"

    def _require_scratch(self) -> Scratch:
        if self._scratch is None:
            raise ToolFailure("the episode is over, and its files are gone")
        return self._scratch

    def _text(self, path: str) -> str:
        content = self._require_scratch().read(path)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise ToolFailure(f"{path!r} is a binary file of {len(content)} bytes, and no text") from None
        if "\0" in text:
            raise ToolFailure(f"{path!r} is a binary file of {len(content)} bytes, and no text")
        return text

    def _write(self, path: str, text: str, *, new: bool) -> None:
        self._require_scratch().write(path, text.encode("utf-8", "replace"), new=new)


def _lines(text: str) -> Sequence[str]:
    """Returns the lines of a text, as an editor counts them."""
    return text.removesuffix("\n").split("\n") if text else []


def _number_lines(lines: Sequence[str], first: int, last: int) -> str:
    return "\n".join(f"{number:6}\t{lines[number - 1]}" for number in range(first, last + 1))
