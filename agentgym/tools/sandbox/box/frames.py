"""Messages over a stream socket: a JSON object, followed by byte strings."""

import json
import os
import struct
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Channel", "Frame", "Pipes", "receive", "send"]

HEAD = struct.Struct("!II")
MAX_BYTES = 1 << 30

Frame = tuple[dict[str, object], list[bytes]]


class Channel(Protocol):
    """The transport of messages: a stream socket, or an object that works as one."""

    def sendall(self, data: bytes, /) -> None:
        """Sends all of `data`."""

    def recv(self, size: int, /) -> bytes:
        """Receives at most `size` bytes, and none at the end."""


class Pipes:
    """A channel of two pipes: those of a container's standard streams."""

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self._writing = reading, writing

    def sendall(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._writing, rest) :]

    def recv(self, size: int) -> bytes:
        return os.read(self.reading, size)


def send(channel: Channel, header: dict[str, object], blobs: Sequence[bytes] = ()) -> None:
    """Sends one message."""
    text = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    channel.sendall(b"".join([HEAD.pack(len(text), sum(map(len, blobs))), text, *blobs]))


def receive(channel: Channel) -> Frame | None:
    """Returns the next message, or None at the end of the channel, or if it breaks off."""
    head = _exactly(channel, HEAD.size)
    if head is None:
        return None
    num_text, num_rest = HEAD.unpack(head)
    if num_text + num_rest > MAX_BYTES:
        return None
    body = _exactly(channel, num_text + num_rest)
    if body is None:
        return None
    header: dict[str, object] = json.loads(body[:num_text])
    blobs, start = [], num_text
    for size in header.pop("sizes"):  # type: ignore[attr-defined]
        blobs.append(body[start : start + size])
        start += size
    return header, blobs


def _exactly(channel: Channel, size: int) -> bytes | None:
    parts, missing = [], size
    while missing:
        part = channel.recv(min(missing, 1 << 20))
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
