"""Conversations that are made up from a seed, in five kinds."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np

from agentgym.chat_templates.protocol import Renderer
from agentgym.rollout.episode.replies import reply_ids
from agentgym.trainers.lessons.demonstrations import Demonstration
from agentgym.trainers.lessons.made_up.chain import chain
from agentgym.trainers.lessons.made_up.desk import desk
from agentgym.trainers.lessons.made_up.look_up import look_up
from agentgym.trainers.lessons.made_up.toolbox import Dialogue, Parameter, Toolbox
from agentgym.trainers.lessons.made_up.values import Values
from agentgym.trainers.lessons.made_up.writing import write_facts

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
    easy_kinds = ((say_again, 0.25), (fill, 0.5), (look_up, 1.0))
    kinds = ((fill, 0.12), (chain, 0.38), (look_up, 0.64), (desk, 0.92), (say_again, 1.0))
    share = box.values.rng.random()
    make = next(make for make, end in (easy_kinds if is_easy else kinds) if share < end)
    dialogue = make(box)
    dialogue.kind = make.__name__
    return dialogue


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
