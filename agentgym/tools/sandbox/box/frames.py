"""Messages over a stream socket: a JSON object with byte strings behind it."""

import json
import socket
import struct
from collections.abc import Sequence

__all__ = ["Frame", "receive", "send"]

HEAD = struct.Struct("!II")
MOST_BYTES = 1 << 30

Frame = tuple[dict[str, object], list[bytes]]


def send(channel: socket.socket, header: dict[str, object], blobs: Sequence[bytes] = ()) -> None:
    """Sends one message."""
    text = json.dumps({**header, "sizes": [len(one) for one in blobs]}).encode()
    channel.sendall(b"".join([HEAD.pack(len(text), sum(map(len, blobs))), text, *blobs]))


def receive(channel: socket.socket) -> Frame | None:
    """The next message; None at the end of the channel, or where it breaks off."""
    head = _exactly(channel, HEAD.size)
    if head is None:
        return None
    num_text, num_rest = HEAD.unpack(head)
    if num_text + num_rest > MOST_BYTES:
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


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts, missing = [], size
    while missing:
        part = channel.recv(min(missing, 1 << 20))
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
