"""The official clients of OpenAI and Anthropic read every reply, stream and error with their own types."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentgym.trajectory import Status

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
THINKING = '<think>\nI think.\n</think>\n\nI run.<tool_call>\n{"name": "run", "arguments": {"n": 3}}\n</tool_call>'


def say(prompt: str) -> str:
    return "all done" if "ran" in prompt else THINKING


def one_row(trajectory: Any) -> None:
    assert trajectory.status is Status.COMPLETED and len(trajectory.rows) == 1 and len(trajectory.turns) == 2
    assert trajectory.turns[0].tool_results[0].content == "ran"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_openais_chat_completions(table: Any, is_streamed: bool) -> None:
    from openai import AsyncOpenAI  # here, and not above: collected by every process, and costly

    async def agent(caller: Any) -> None:
        tool = {"type": "function", "function": {"name": "run", "description": "Runs.", "parameters": SCHEMA}}
        messages: list[Any] = [{"role": "user", "content": "go"}]
        async with AsyncOpenAI(base_url=f"{caller.root}/v1", api_key="none") as client:
            for _ in range(2):
                options: Any = {"model": "policy", "messages": messages, "tools": [tool], "logprobs": not is_streamed}
                if is_streamed:
                    async with client.chat.completions.stream(**options) as stream:
                        completion: Any = await stream.get_final_completion()
                else:
                    completion = await client.chat.completions.create(**options)
                    sampled = table.sampled[-1]
                    assert completion.usage.completion_tokens == len(sampled)
                    assert [each.logprob for each in completion.choices[0].logprobs.content] == [-0.25] * len(sampled)
                reply = completion.choices[0].message
                messages.append(reply.model_dump(exclude_none=True))
                for call in reply.tool_calls or ():
                    assert call.function.name == "run" and json.loads(call.function.arguments) == {"n": 3}
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "ran"})
            assert reply.content == "all done"
            assert [model.id for model in (await client.models.list()).data] == ["policy"]
            assert (await client.models.retrieve("anything/else")).id == "anything/else"
        await caller.finish()

    one_row(table.play(agent, say))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("history", ["items", "previous_response_id"])
def test_openais_responses(table: Any, is_streamed: bool, history: str) -> None:
    from openai import AsyncOpenAI, BadRequestError

    async def agent(caller: Any) -> None:
        inner = {"type": "function", "name": "run", "description": "Runs.", "parameters": SCHEMA, "strict": False}
        tools = [{"type": "namespace", "name": "mcp__box", "tools": [inner]}, {"type": "web_search"}]
        items: list[Any] = [{"role": "user", "content": "go"}]
        options: Any = {"model": "policy", "instructions": "Be brief.", "tools": tools}
        async with AsyncOpenAI(base_url=f"{caller.root}/v1", api_key="none") as client:
            for _ in range(2):
                if is_streamed:
                    async with client.responses.stream(input=items, **options) as stream:
                        events = [event.type async for event in stream]
                        response: Any = await stream.get_final_response()
                    assert events[0] == "response.created" and events[-1] == "response.completed"
                else:
                    response = await client.responses.create(input=items, **options)
                assert response.usage.output_tokens == len(table.sampled[-1])
                items = items if history == "items" else []
                items += [item.model_dump(exclude_none=True) for item in response.output] if history == "items" else []
                if history != "items":
                    options["previous_response_id"] = response.id
                for call in (item for item in response.output if item.type == "function_call"):
                    assert (call.name, call.namespace) == ("run", "mcp__box") and json.loads(call.arguments) == {"n": 3}
                    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "ran"})
            assert response.output_text == "all done"
            with pytest.raises(BadRequestError) as caught:
                await client.responses.create(model="policy", input="hi", previous_response_id="resp_nowhere")
            assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: say(prompt).replace('"run"', '"mcp__box__run"'))
    one_row(trajectory)
    assert trajectory.turns[0].message.reasoning == "I think."


@pytest.mark.parametrize("is_streamed", [False, True])
def test_anthropics_messages(table: Any, is_streamed: bool) -> None:
    from anthropic import AsyncAnthropic, BadRequestError

    async def agent(caller: Any) -> None:
        tool: Any = {"name": "run", "description": "Runs.", "input_schema": SCHEMA}
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "go"}]}]
        async with AsyncAnthropic(base_url=caller.root, api_key="none") as client:
            for _ in range(2):
                options: Any = {"model": "policy", "max_tokens": 20_000, "messages": messages, "tools": [tool]}
                counted = await client.messages.count_tokens(model="policy", messages=messages, tools=[tool])
                if is_streamed:
                    async with client.messages.stream(**options) as stream:
                        message: Any = await stream.get_final_message()
                else:
                    message = await client.messages.create(**options)
                assert message.usage.output_tokens == len(table.sampled[-1])
                assert message.usage.input_tokens == counted.input_tokens
                messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": "ran"}
                    for block in message.content
                    if block.type == "tool_use" and block.input == {"n": 3}
                ]
                if results:
                    assert message.stop_reason == "tool_use" and message.content[0].thinking == "I think."
                    messages.append({"role": "user", "content": results})
            assert (message.content[0].text, message.stop_reason) == ("all done", "end_turn")
            with pytest.raises(BadRequestError, match="image") as caught:
                image = {"type": "image", "source": {"type": "url", "url": "x"}}
                await client.messages.create(
                    model="policy", max_tokens=9, messages=[{"role": "user", "content": [image]}]
                )
            assert caught.value.body["error"]["type"] == "invalid_request_error"
        await caller.finish()

    one_row(table.play(agent, say))


def test_a_full_window_is_worded_as_each_provider_words_it(table: Any) -> None:
    long = {"model": "policy", "messages": [{"role": "user", "content": "x" * 5000}], "max_tokens": 5}

    async def agent(caller: Any) -> None:
        status, body = await caller.send("/v1/messages", long)
        assert status == 400 and body["error"]["message"].startswith("prompt is too long: ")
        status, body = await caller.send("/v1/responses", {"input": long["messages"]})
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "input")
        await caller.chat([{"role": "user", "content": "short"}])
        await caller.finish()

    engine = table.engine(lambda prompt: "all done", context_window=4096)
    assert table.play(agent, lambda prompt: "", engine=engine).status is Status.COMPLETED


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_mistakes_are_answered_in_the_dialects_form_and_the_episode_goes_on(table: Any, path: str) -> None:
    field = "input" if "responses" in path else "messages"
    item: Any = {"type": "function_call_output", "call_id": "call_9", "output": "x"}
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_9", "content": "x"}]}
    orphan = {"input": [item]} if field == "input" else {"messages": [result]}
    if "chat" in path:
        orphan = {"messages": [{"role": "tool", "tool_call_id": "call_9", "content": "x"}]}

    async def agent(caller: Any) -> None:
        def check(status: int, body: Any, kind: str) -> None:
            assert body["error"]["type"] == kind and body["error"]["message"], (status, body)
            assert (body.get("type") == "error") == ("messages" in path)

        for body in ({field: [{"content": "no role"}]}, orphan, {field: []}):
            check(*await caller.send(path, body), "invalid_request_error")
        headers = {"Content-Type": "application/json"}
        async with caller.http.post(f"{caller.root}{path}", data=b"{not JSON", headers=headers) as answer:
            check(answer.status, await answer.json(), "invalid_request_error")
        async with caller.http.post(f"{caller.url}{path}", json={}, headers={"x-api-key": "sk-nobody"}) as answer:
            kind = "authentication_error" if "messages" in path else "invalid_request_error"
            check(answer.status, await answer.json(), kind)
            assert answer.status == 401
        await caller.post(path, {field: [{"role": "user", "content": "go"}], "max_tokens": 500, "odd": 1})
        await caller.finish()
        status, body = await caller.send(path, {field: [{"role": "user", "content": "more"}]})
        check(status, body, "invalid_request_error")
        assert status == 410

    assert table.play(agent, lambda prompt: "all done").status is Status.COMPLETED


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"tool_choice": "required", "messages": []}),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}, "messages": []}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, "input": []}),
        ("/v1/messages", {"tool_choice": {"type": "tool", "name": "run"}, "messages": []}),
    ],
)
@pytest.mark.parametrize("takes_grammar", [True, False])
def test_what_holds_a_reply_is_honored_and_excluded_or_refused_by_its_name(
    table: Any, path: str, fields: dict[str, Any], takes_grammar: bool
) -> None:
    grammars: list[str] = []
    tool: Any = {"name": "run", "parameters": SCHEMA, "input_schema": SCHEMA}
    tool = {"type": "function", "function": tool} if "chat" in path else tool
    body = {**fields, "tools": [tool]}
    body["input" if "input" in fields else "messages"] = [{"role": "user", "content": "go"}]

    async def agent(caller: Any) -> None:
        status, answer = await caller.send(path, body)
        assert status == (200 if takes_grammar else 400)
        if not takes_grammar:
            assert next(iter(fields)) in answer["error"]["message"]
        await caller.chat([{"role": "user", "content": "now"}])
        await caller.finish()

    engine = table.engine(lambda prompt: "all done")
    engine.takes_grammar = takes_grammar
    generate = engine.generate

    async def noted(prompt_ids: Any, sampling: Any, *, session: str) -> Any:
        grammars.append(sampling.grammar)
        return await generate(prompt_ids, sampling, session=session)

    engine.generate = noted
    trajectory = table.play(agent, lambda prompt: "", engine=engine)
    spans = [span for row in trajectory.rows for span in row.spans if span.source == "policy"]
    assert sorted(span.excluded for span in spans) == (["", "constrained"] if takes_grammar else [""])
    if takes_grammar:
        assert json.loads(grammars[0])["format"] and not grammars[1]
