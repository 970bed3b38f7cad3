"""Logs a run with trackio: `TRACKIO_DIR=FOLDER python to_trackio.py FILE.jsonl RUN/metrics.jsonl`.

The episodes (`agentgym episodes RUN FILE.jsonl`) are its traces, the metrics its curves.
"""

import json
import sys

import trackio


def read_trace(line: str) -> trackio.Trace:
    """The trace of an episode: replies with their calls, and their results."""
    episode = json.loads(line)
    messages = [{"role": "user", "content": episode["task"]["env_id"]}]
    for turn in episode["turns"]:
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call.get("name", "raw"), "arguments": json.dumps(call.get("arguments"))},
            }
            for call in turn["message"]["tool_calls"]
        ]
        messages.append({"role": "assistant", "content": turn["message"]["content"] or "", "tool_calls": calls})
        messages += [
            {"role": "tool", "content": result["content"], "tool_call_id": result["call_id"]}
            for result in turn["tool_results"]
        ]
    return trackio.Trace(
        messages=messages, metadata={"success": bool(episode["success"]), "stop": episode["stop_reason"]}
    )


def main(episodes: str, metrics: str) -> None:
    """Logs the run."""
    trackio.init(project="episodes", name="run")
    with open(metrics, encoding="utf-8") as lines:
        for line in lines:
            values = json.loads(line)
            numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
            trackio.log(numbers, step=numbers.pop("step"))
    with open(episodes, encoding="utf-8") as lines:
        for line in lines:
            trackio.log({"episode": read_trace(line)}, step=0)
    trackio.finish()


main(*sys.argv[1:])
