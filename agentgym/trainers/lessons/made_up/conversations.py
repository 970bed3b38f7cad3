"""Conversations that are made up from a seed, in four kinds."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

import numpy as np

from agentgym.chat_templates.protocol import Renderer
from agentgym.rollout.episode.replies import reply_ids
from agentgym.trainers.lessons.demonstrations import Demonstration
from agentgym.trainers.lessons.made_up.chain import chain
from agentgym.trainers.lessons.made_up.toolbox import Dialogue, Parameter, Toolbox
from agentgym.trainers.lessons.made_up.values import Values
from agentgym.trainers.lessons.made_up.words import FIRST_NAMES, NOUNS
from agentgym.trainers.lessons.made_up.writing import DONE, in_words, list_words, plain_label, write_facts, write_rows
from agentgym.types import JSON, Message

__all__ = ["encode_dialogue", "made_up_conversation", "made_up_rows"]

ASK_FOR_CALL = ("Call {0}", "Please {1}", "{1}", "Use {0}", "I want to {1}", "Can you {1}", "Use the tool {0}", "{0}")
ASK_TO_SAY = (
    *("Say {}", "Repeat: {}", "Answer with {}", "{}\nSay that again.", "The text is: {}", "Write {}"),
    *('Send "{}"', "Submit {}"),
)
TEXT_NAMES = ("text", "answer", "message", "value", "content", "reply", "words", "query")


def made_up_conversation(seed: int, pieces: Sequence[str] = (), *, is_easy: bool = False) -> Dialogue:
    """Returns the conversation of a seed; `pieces` are the tokenizer's words, of which some of its words are.

    In an easy one there is a text to say again, a tool to fill in or a row of two or three to find, and little else to
    look at.
    """
    box = Toolbox(Values(np.random.default_rng([seed, 77]), pieces), is_easy=is_easy)
    kind = box.values.rng.random()
    if is_easy:
        return say_again(box) if kind < 0.25 else fill(box) if kind < 0.5 else look_up(box)
    if kind < 0.15:
        return fill(box)
    if kind < 0.45:
        return chain(box)
    return look_up(box) if kind < 0.90 else say_again(box)


def fill(box: Toolbox) -> Dialogue:
    """The user says what to call and with what, once or for each of several items."""
    values, name, parameters = box.values, box.tool_name(), box.parameters(1, 2 if box.is_easy else 4)
    rounds = [box.arguments(parameters) for _ in range(1 if box.is_easy else values.pick((1, 1, 1, 2, 3, 4)))]
    noise = (
        write_facts(values, facts) if (facts := box.facts(0, 0 if box.is_easy else 3)) and values.chance(0.5) else ""
    )
    head = values.pick(ASK_FOR_CALL).format(name, name.replace("_", " "))
    is_many, at_once = len(rounds) > 1, len(rounds) > 1 and values.chance(0.4)
    items = [write_facts(values, arguments) for arguments in rounds]
    if is_many:
        numbered = [f"{number}. {item}" for number, item in enumerate(items, 1)] if values.chance(0.5) else items
        ask = head + values.pick((" for each of:\n", " with each of these:\n", ":\n")) + "\n".join(numbered)
        how = ("All at once.", "In one reply.") if at_once else ("One after the other.", "One call in each reply.")
        ask += "\n" + values.pick(how)
    else:
        ask = head + values.pick((" with ", ": ", ", ", "\n", ".\n")) + items[0]
    text = values.pick(("\n", "\n", " ")).join(values.sample([part for part in (noise, ask) if part], 2))
    dialogue = box.open(box.with_others([box.tool(name, parameters)], 5), text)
    for group in [rounds] if at_once else [[arguments] for arguments in rounds]:
        dialogue.call([box.result() for _ in group], *((name, arguments) for arguments in group))
    dialogue.end(values.pick(("Done.", "It is done.", "OK.")) if values.chance(0.25) else None)
    return dialogue


def look_up(box: Toolbox) -> Dialogue:
    """A table is in the opening or in a result; the row that the user names has the values for the next call.

    Then the user may name further ones.
    """
    values, is_small = box.values, box.is_easy or box.values.chance(0.5)
    key = Parameter(box.new_name(values.label), values.pick(("string", "string", "integer")))
    columns = box.parameters(1, 1 if is_small else 3)
    order = values.sample([key, *columns], 1 + len(columns))
    rows = [box.arguments(order) for _ in range(values.pick((2, 3, 4, 5) if is_small else (2, 2, 2, 3, 3, 4, 5, 7)))]
    if is_small and key.type == "string":
        rows = [{**row, key.name: values.pick((*NOUNS, *FIRST_NAMES))} for row in rows]
    rows = list({in_words(row[key.name]): row for row in rows}.values())  # each key once
    row, text = values.pick(rows), write_rows(values, rows, key.name)
    parameters = values.sample(columns, values.between(1, len(columns)))
    if values.chance(0.4 if is_small else 0.3):
        parameters = [key, *parameters]
    name = box.tool_name()
    tools, ask = [box.tool(name, parameters)], _ask_for_row(values, name, parameters, key, row)
    if not box.is_easy and values.chance(0.3 if is_small else 0.7):
        finder, chosen = box.tool_name(), values.rng.random()
        inputs = {key.name: row[key.name]} if chosen < 0.25 else {}
        keys = [key] if inputs else []
        if chosen > 0.6:  # what the rows are found by is not in them
            owner = Parameter(box.new_name(values.label), values.pick(("string", "string", "integer")))
            keys, inputs = [owner], {owner.name: box.value(owner)}
            label, name_of_owner = plain_label(values, owner.name), in_words(inputs[owner.name])
            ask = values.pick(
                (f"{ask}, {label} {name_of_owner}", f"{name_of_owner}: {ask}", f"{ask} of {name_of_owner}")
            )
        hint = values.pick(("lists them", "shows all", "knows more", "comes first"))
        dialogue = box.open(
            box.with_others([*tools, box.tool(finder, keys)], 3), f"{ask}. {plain_label(values, finder)} {hint}."
        )
        dialogue.call([text], (finder, inputs))
    else:
        dialogue = box.open(
            box.with_others(tools, 1 if is_small else 3), values.pick((f"{text}\n{ask}.", f"{ask}.\n{text}"))
        )
    counts = (5, 6, 7, 8) if box.is_easy else (3, 5, 7) if is_small else (1, 1, 1, 2, 3, 4)
    for number in range(values.pick(counts)):
        if number:
            row = values.pick(rows)
            dialogue.messages.append(Message("user", _ask_for_row(values, name, parameters, key, row)))
        result = values.pick(DONE) if is_small else box.result()
        dialogue.call([result], (name, {parameter.name: row[parameter.name] for parameter in parameters}))
    dialogue.end(values.pick(("Done.", "It is done.", "OK.")) if values.chance(0.25) else None)
    return dialogue


def _ask_for_row(
    values: Values, tool: str, parameters: Sequence[Parameter], key: Parameter, row: Mapping[str, JSON]
) -> str:
    subject, plain = in_words(row[key.name]), tool.replace("_", " ")
    labels = list_words([plain_label(values, parameter.name) for parameter in parameters])
    return values.pick(
        (
            f"Call {tool} for {subject}",
            f"Call {tool} with {labels} of {subject}",
            f"{plain}: {subject}",
            f"Please {plain} for the {plain_label(values, key.name)} {subject}",
            f"{values.phrase(1, 5)} {subject} {values.phrase(1, 3)}: {plain}",
        )
    )


def say_again(box: Toolbox) -> Dialogue:
    """A text, list or long number is to be said again: in a call of the one tool, or without a tool as the reply."""
    values = box.values
    texts: tuple[Callable[[], str], ...] = (
        lambda: values.phrase(1, 12),
        lambda: values.digits(3, 16),
        lambda: " ".join(str(abs(values.integer())) for _ in range(values.between(1, 6))),
        lambda: values.letters(string.ascii_letters + string.digits, 4, 14),
        lambda: " ".join(values.person() for _ in range(values.between(1, 3))),
        values.text,
    )
    text = values.draw(texts)
    ask = (values.sentence(1, 8) + " " if values.chance(0.4) else "") + values.pick(ASK_TO_SAY).format(text)
    if values.chance(0.3):
        dialogue = box.open([], ask)
        dialogue.end(text)
        return dialogue
    label = values.pick(TEXT_NAMES) if values.chance(0.6) else values.label()
    name, parameter = box.tool_name(), Parameter(box.new_name(lambda: label), "string")
    dialogue = box.open([box.tool(name, [parameter])], ask)
    dialogue.call([box.result()], (name, {parameter.name: text}))
    dialogue.end(None)
    return dialogue


def encode_dialogue(renderer: Renderer, dialogue: Dialogue) -> Demonstration:
    """Returns the ids of a conversation as a rollout has them; replies are learned, except for mistakes."""
    messages = dialogue.messages
    places = [place for place, message in enumerate(messages) if message.role == "assistant"]
    ids = list(renderer.render(messages[: places[0]], dialogue.tools))
    mask = [False] * len(ids)
    for place, following in zip(places, [*places[1:], len(messages)], strict=True):
        reply = reply_ids(renderer, messages[place])
        ids += reply
        mask += [place not in dialogue.mistakes] * len(reply)
        if following < len(messages):
            answer = renderer.extend(ids, messages[place + 1 : following])
            ids += answer
            mask += [False] * len(answer)
    return Demonstration(tuple(ids), tuple(mask))


def made_up_rows(
    renderer: Renderer, pieces: Sequence[str], first_seed: int, *, num_easy: int = 0
) -> Iterator[Demonstration]:
    """Yields the rows of the conversations of all seeds from `first_seed` on; those below `num_easy` are easy."""
    for seed in count(first_seed):
        yield encode_dialogue(renderer, made_up_conversation(seed, pieces, is_easy=seed < num_easy))
