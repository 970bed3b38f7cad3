"""Requests that Codex, Claude Code, OpenCode, Pi, mini-swe-agent and two SDKs have sent, with shortened texts.

Each scenario is what one agent sent to a scripted model. It is sent again in its order, the ids that the model had
given out replaced by ours, to a policy with the same replies. The branches are those of the agent's conversations.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded_requests.json").read_text())
BRANCHES = {  # the label and the number of replies of each row
    "claude-ctx": [("main", 2), ("fork", 1), ("main", 1)],
    "claude-drop": [("main", 2)],
    "claude-think": [("main", 3)],
    "claude-unknown": [("main", 2)],
    "codex-ctx": [("main", 1), ("fork", 1), ("main", 1), ("summary", 1), ("summary", 1)],
    "codex-drop": [("main", 2)],
    "codex-malformed": [("main", 2)],
    "codex-mcp": [("main", 2)],
    "codex-subagent": [("main", 3), ("sub-agent", 1), ("sub-agent", 1)],
    "mini-rec": [("main", 7), ("fork", 1), ("fork", 1)],
    "opencode-openai-think": [("main", 3), ("title", 1)],
    "opencode-openai_compatible-malformed": [("main", 2), ("title", 1)],
    "pi-anthropic-messages-think": [("main", 3)],
    "pi-openai-completions-ctxu": [("main", 4), ("side", 1)],
    "pi-openai-completions-malformed": [("main", 2), ("side", 1)],
    "sdk-parallel": [("main", 2), ("fork", 2), ("side", 2)],
}


def spell(reply: dict[str, Any]) -> str:
    """What a policy writes for a scripted reply."""
    parts = [f"<think>\n{reply['reasoning']}\n</think>\n\n"] if reply.get("reasoning") else []
    parts.append(reply.get("text") or "")
    for call in reply.get("calls") or ():
        name = f"{call['ns']}__{call['name']}" if call.get("ns") else call["name"]
        arguments = call.get("raw") or json.dumps(call["arguments"])
        parts.append(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')
    return "".join(parts)


@pytest.mark.parametrize("scenario", BRANCHES)
def test_recorded_requests_have_the_branches_of_their_agent(table: Any, scenario: str) -> None:
    replies: list[str] = []

    async def agent(caller: Any) -> None:
        ids: dict[str, str] = {}
        number = 0
        for request in RECORDED[scenario]:
            raw = json.dumps(request["body"])
            for recorded, own in ids.items():
                raw = raw.replace(json.dumps(recorded), json.dumps(own))
            if "error" in request["reply"] or request["reply"].get("cut"):
                continue  # the agent sent it again
            number += 1
            replies.append(spell(request["reply"]))
            headers = {**request["headers"], "Content-Type": "application/json"}
            async with caller.http.post(f"{caller.root}{request['path']}", data=raw, headers=headers) as answer:
                text = await answer.text()
                assert answer.status == 200, text
            for index, own in enumerate(dict.fromkeys(re.findall(r'"(turn\d+_call_\d+)"', text))):
                ids |= {f"call_{number}_{index}": own, f"toolu_{number}_{index}": own}
            for own in re.findall(r'"(?:signature|encrypted_content)": "(turn\d+)"', text):
                ids |= {f"ENC{number}": own, f"SIG{number}": own}
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: replies.pop(0))
    assert not replies
    rows = [(row.origin.label, sum(span.source == "policy" for span in row.spans)) for row in trajectory.rows]
    assert rows == BRANCHES[scenario]
    assert trajectory.num_trained_tokens == sum(map(len, table.sampled))
    paid = [turn.message.content for turn in trajectory.turns if turn.reward]
    assert paid == ([] if scenario == "codex-ctx" else ["All done."]), "the agent's final text, and no other"
