"""Writes the episodes of `agentgym episodes RUN FILE.jsonl` for Inspect: `python to_inspect.py FILE.jsonl LOG.eval`."""

import json
import sys
from datetime import UTC, datetime

from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalLog,
    EvalMetric,
    EvalResults,
    EvalSample,
    EvalScore,
    EvalSpec,
    EvalStats,
    write_eval_log,
)
from inspect_ai.model import ChatMessage, ChatMessageAssistant, ChatMessageTool, ChatMessageUser, ModelOutput
from inspect_ai.scorer import Score
from inspect_ai.tool import ToolCall


def read_sample(line: str) -> EvalSample:
    """The sample of an episode: each turn's reply, and the results of its calls or the observation."""
    episode = json.loads(line)
    task = f"{episode['task']['env_id']}/{episode['task']['seed']}"
    messages: list[ChatMessage] = [ChatMessageUser(content=task)]
    for turn in episode["turns"]:
        calls = [
            ToolCall(id=call["id"], function=call.get("name", "raw"), arguments=call.get("arguments") or {})
            for call in turn["message"]["tool_calls"]
        ]
        messages.append(ChatMessageAssistant(content=turn["message"]["content"] or "", tool_calls=calls or None))
        messages += [
            ChatMessageTool(content=result["content"], tool_call_id=result["call_id"], function=result["name"])
            for result in turn["tool_results"]
        ] or [ChatMessageUser(content=turn["observation"])]
    score = Score(
        value="C" if episode["success"] else "I",
        explanation=episode["stop_reason"],
        answer=episode["turns"][-1]["observation"][:80] if episode["turns"] else "",
    )
    return EvalSample(
        id=episode["task"]["seed"],
        epoch=1,
        input=task,
        target="",
        messages=messages,
        output=ModelOutput.from_content("policy", messages[-1].text),
        scores={"success": score},
    )


def main(episodes: str, log: str) -> None:
    """Writes the log."""
    with open(episodes, encoding="utf-8") as lines:
        samples = [read_sample(line) for line in lines]
    share = sum(sample.scores["success"].value == "C" for sample in samples if sample.scores) / len(samples)
    score = EvalScore(name="success", scorer="success", metrics={"accuracy": EvalMetric(name="accuracy", value=share)})
    now = datetime.now(UTC).isoformat()
    spec = EvalSpec(
        created=now,
        task="episodes",
        dataset=EvalDataset(samples=len(samples)),
        model="agentgym/policy",
        config=EvalConfig(),
    )
    results = EvalResults(total_samples=len(samples), completed_samples=len(samples), scores=[score])
    stats = EvalStats(started_at=now, completed_at=now)
    write_eval_log(EvalLog(status="success", eval=spec, results=results, stats=stats, samples=samples), log)


main(*sys.argv[1:])
