"""A server that prints what is no message, before and between its messages; it writes what it wants to its output."""

from __future__ import annotations

import json
import os
import sys

SCHEMA = {"type": "object", "properties": {"mib": {"type": "integer"}}}
TOOLS = [{"name": name, "inputSchema": SCHEMA} for name in ("flood", "pid", "crash")]


def say(text: str) -> None:
    """Writes to standard output, whatever anybody made of `sys.stdout`."""
    data = text.encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


say("Hello! I am a careless server.")
for line in sys.stdin:
    request = json.loads(line)
    say("got a line")
    say("{ this is nothing")
    results = {
        "initialize": {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "careless", "version": "1"},
        },
        "tools/list": {"tools": TOOLS},
        "ping": {},
    }
    method = request.get("method")
    if method == "tools/call":
        name = request["params"]["name"]
        if name == "crash":
            os._exit(3)
        size = request["params"]["arguments"].get("mib", 0)
        sys.stderr.write("e" * 300_000)
        text = str(os.getpid()) if name == "pid" else "x" * (size << 20)
        result = {"content": [{"type": "text", "text": text}]}
    elif method in results:
        result = results[method]
    else:
        continue
    say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}))
