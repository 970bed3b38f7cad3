"""A server without the SDK, which starts at once: it prints what is no message, before and between its messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCHEMA = {"type": "object", "properties": {"mib": {"type": "integer"}, "amount": {"type": "integer"}}}
TOOLS = [{"name": name, "inputSchema": SCHEMA} for name in ("flood", "pid", "crash", "add", "daemon")]


def say(text: str) -> None:
    """Writes to standard output, whatever anybody made of `sys.stdout`."""
    data = text.encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def call(name: str, mib: int = 0, amount: int = 1, **_: object) -> str:
    """Runs a tool: `daemon` leaves a process behind, in a session of its own."""
    global count
    if name == "crash":
        print("out of cheese", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "daemon":
        return str(subprocess.Popen(["sleep", "3600"], start_new_session=True).pid)
    if name == "add":
        count += amount
        return str(count)
    return str(os.getpid()) if name == "pid" else "x" * (mib << 20)


count = 0
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
        sys.stderr.write("e" * 300_000)
        text = call(request["params"]["name"], **request["params"]["arguments"])
        result = {"content": [{"type": "text", "text": text}]}
    elif method in results:
        result = results[method]
    else:
        continue
    say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}))
