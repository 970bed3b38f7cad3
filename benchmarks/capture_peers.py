"""The rows that verifiers 0.4 or OpenEnv 0.10 captures of the calls on standard input, for `capture.py`."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

Call = dict[str, Any]
Rows = list[tuple[list[int], list[bool]]]


def verifiers_rows(calls: list[Call]) -> dict[str, Rows]:
    """The branches of a trace, and what prime-rl takes of them: a shared node is trained in the first branch alone."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.dialects.chat import parse_message
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.task import TaskData
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import Response, TurnTokens

    task = TraceTask(type="Task", data=TaskData(idx=0, prompt="Go."))
    trace = Trace(task=task, agent=AgentInfo(config=AgentConfig()))
    end = calls[0]["sampled_ids"][-1]
    for number, call in enumerate(calls):
        ends = [place + 1 for place, token in enumerate(call["prompt_ids"]) if token == end]
        spans = list(zip([0, *ends], ends, strict=False))
        tokens = TurnTokens(
            prompt_ids=call["prompt_ids"],
            completion_ids=call["sampled_ids"],
            completion_logprobs=[0.0] * len(call["sampled_ids"]),
            message_spans=spans,
        )
        message = parse_message(call["reply"])
        response = Response(
            id=str(number), created=0, model="policy", message=message, finish_reason="stop", tokens=tokens
        )
        prepare_turn(trace, [parse_message(each) for each in call["messages"]]).commit(response)
    whole: Rows = []
    once: Rows = []
    trained: set[int] = set()
    for branch in trace.branches:
        ids = [token for node in branch.nodes for token in node.token_ids]
        whole.append((ids, [bit for node in branch.nodes for bit in node.mask]))
        once.append((ids, [bit and id(node) not in trained for node in branch.nodes for bit in node.mask]))
        trained |= {id(node) for node in branch.nodes}
    return {"branches": whole, "as prime-rl trains": once}


def openenv_rows(calls: list[Call]) -> dict[str, Rows]:
    """The trainable sequences of a session, and the entries of its training trace, one for a call."""
    from openenv.core.harness.capture.contract import to_trace_entries
    from openenv.core.harness.capture.export import export_session
    from openenv.core.harness.capture.graph import RolloutGraph, TurnNode

    graph = RolloutGraph()
    for number, call in enumerate(calls):
        node = TurnNode(
            str(number),
            call["prompt_ids"],
            call["sampled_ids"],
            [-1.0] * len(call["sampled_ids"]),
            model="policy",
            finish_reason="stop",
            request_messages=call["messages"],
            response_message=call["reply"],
        )
        graph.add_turn(node)
    session = SimpleNamespace(graph=graph, session_id="one", metadata={}, findings=[])
    document = export_session(session)
    sequences = [(row["input_ids"], [*map(bool, row["loss_mask"])]) for row in document["sequences"]]
    entries = to_trace_entries(graph, document)
    single = [
        (entry["prompt_token_ids"] + entry["completion_token_ids"], [*map(bool, entry["loss_mask"])])
        for entry in entries
    ]
    return {"sequences": sequences, "as its trace trains": single}


if __name__ == "__main__":
    rows_of = {"verifiers": verifiers_rows, "openenv": openenv_rows}[sys.argv[1]]
    print(json.dumps(rows_of(json.load(sys.stdin))))
