"""A server without the SDK whose pages of tools are its argument, as JSON; a call is answered with itself."""

from __future__ import annotations

import json
import sys

pages = json.loads(sys.argv[1])
for line in sys.stdin:
    request = json.loads(line)
    method, parameters = request.get("method"), request.get("params") or {}
    if method == "initialize":
        server = {"name": "listed", "version": "1"}
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": server}
    elif method == "tools/list":
        number = int(parameters.get("cursor") or 0)
        result = {"tools": pages[number]} | ({"nextCursor": str(number + 1)} if number + 1 < len(pages) else {})
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": json.dumps([parameters["name"], parameters["arguments"]])}]}
        if raw := parameters["arguments"].get("raw"):
            print(f'{{"jsonrpc":"2.0","id":{json.dumps(request["id"])},"result":{raw}}}', flush=True)
            continue
    elif method == "ping":
        result = {}
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
