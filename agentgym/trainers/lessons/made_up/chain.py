"""Conversations in which each call takes what the user or an earlier result says, or what is computed from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentgym.trainers.lessons.made_up.toolbox import Dialogue, Parameter, Toolbox
from agentgym.trainers.lessons.made_up.writing import in_words, list_words, plain_label, write_facts
from agentgym.types import JSON, ToolSpec

__all__ = ["chain"]


@dataclass(frozen=True)
class Fact:
    """A value that is on the page: its parameter, the value, and the words that ask for it."""

    parameter: Parameter
    value: JSON
    words: str

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.parameter.name


@dataclass(frozen=True)
class Link:
    """A call of the chain: the sentence that asks for it, its tool, its arguments and what its result says."""

    sentence: str
    tool: ToolSpec
    arguments: Mapping[str, JSON]
    result: Mapping[str, JSON]


class _Chain:
    """The calls of a conversation and what is known before each."""

    def __init__(self, box: Toolbox, *, computes: bool) -> None:
        self.box, self.values, self.computes = box, box.values, computes
        self.opening = [self._fact(parameter) for parameter in box.parameters(1, 3)]
        self.facts = list(self.opening)
        self._newest = list(self.opening)
        self.links: list[Link] = []

    def _fact(self, parameter: Parameter) -> Fact:
        return Fact(parameter, self.box.value(parameter), f"the {plain_label(self.values, parameter.name)}")

    def add(self, *, is_last: bool) -> None:
        """Adds a call with some of the newest facts; its result has the facts for the next one."""
        values, tool = self.values, self.box.tool_name()
        inputs = values.sample(self._newest, values.between(1, 2))
        if values.chance(0.4):
            inputs += [fact for fact in values.sample(self.facts, 1) if fact not in inputs]
        if self.computes and values.chance(0.3):
            inputs += self._computation()
        arguments = values.sample(inputs, len(inputs))
        parameters = [fact.parameter for fact in arguments]
        results = [self._fact(p) for p in self.box.parameters(0 if is_last else 1, 1 if is_last else 3)]
        result = {fact.name: fact.value for fact in results}
        if values.chance(0.3):
            result |= self.box.facts(1, 2)
        if values.chance(0.3):  # says again what it was asked
            again = values.pick(arguments)
            result = {again.name: again.value, **result}
        sentence = self._sentence(tool, list_words([fact.words for fact in inputs]))
        call = {fact.name: fact.value for fact in arguments}
        self.links.append(Link(sentence, self.box.tool(tool, parameters), call, result))
        self.facts += results
        self._newest = results or self._newest

    def _sentence(self, tool: str, words: str) -> str:
        then = ("Then ", "After that, ", "Next, ", "Now ") if self.links else ("First ", "", "First, ")
        plain = tool.replace("_", " ")
        ask = self.values.pick((f"call {tool}", f"use {tool}", plain, f"use the tool {tool}"))
        sentence = f"{self.values.pick(then)}{ask} with {words}."
        return sentence[0].upper() + sentence[1:]

    def _computation(self) -> list[Fact]:
        """Returns a fact that is computed from one or two known integers; none where no integer is known."""
        values = self.values
        integers = [
            (fact, fact.value)
            for fact in self.facts
            if fact.parameter.type == "integer" and isinstance(fact.value, int) and 0 <= fact.value < 10_000
        ]
        if not integers:
            return []
        (first, a), (second, b) = (*values.sample(integers, 2), *integers)[:2]
        if len(integers) == 1 or values.chance(0.4):
            amount = values.between(1, 30) if values.chance(0.7) else values.between(1, 500)
            more = (a + amount, values.pick((f"{first.words} plus {amount}", f"{amount} more than {first.words}")))
            less = (a - amount, values.pick((f"{first.words} minus {amount}", f"{amount} less than {first.words}")))
            value, words = more if a < amount else values.pick((more, less))
        else:
            value, words = values.pick(
                (
                    (a + b, f"the sum of {first.words} and {second.words}"),
                    (a + b, f"{first.words} plus {second.words}"),
                    (max(a, b) - min(a, b), f"the difference of {first.words} and {second.words}"),
                    (max(a, b), f"the larger of {first.words} and {second.words}"),
                    (min(a, b), f"the smaller of {first.words} and {second.words}"),
                )
            )
        fact = Fact(Parameter(self.box.new_name(values.label), "integer"), value, words)
        self.facts.append(fact)
        return [fact]


def chain(box: Toolbox) -> Dialogue:
    """Returns one to four calls; mostly the user says them, else the tools alone show what there is to do."""
    values = box.values
    says_steps = values.chance(0.75)
    calls = _Chain(box, computes=says_steps)  # which nobody could guess
    num_calls = values.between(1, 4)
    for number in range(num_calls):
        calls.add(is_last=number == num_calls - 1)
    links = calls.links
    facts = {fact.name: fact.value for fact in calls.opening} | (box.facts(1, 2) if values.chance(0.3) else {})
    page = write_facts(values, facts)
    if says_steps:
        task = values.pick((" ", " ", "\n")).join(link.sentence for link in links)
    else:
        last = links[-1].tool.name
        task = values.pick((f"Please {last.replace('_', ' ')}.", last, "Do it.", "Use all tools in their order."))
    tools = [link.tool for link in links]
    tools = box.with_others(tools, 4) if says_steps else tools  # in their order, where nothing else tells it
    if values.chance(0.5):
        dialogue = box.open(tools, page, system=task)
    else:
        dialogue = box.open(tools, values.pick((f"{task}\n{page}", f"{page}\n{task}", f"{page} {task}")))
    for link in links:
        if values.chance(0.08):
            _mistake(box, dialogue, link)
        dialogue.call([write_facts(values, link.result)], (link.tool.name, link.arguments))
    dialogue.end(_last_reply(box, links[-1].result) if values.chance(0.25) else None)
    return dialogue


def _mistake(box: Toolbox, dialogue: Dialogue, link: Link) -> None:
    """Adds a call that is refused: another player made it."""
    values = box.values
    arguments = {
        name: values.integer() if isinstance(value, int) and not isinstance(value, bool) else value
        for name, value in link.arguments.items()
    }
    reasons = ("not there", "wrong value", f"no such {values.pick(list(arguments))}", "it failed", "try again")
    error = values.pick(("Error: ", "", "error: ")) + values.pick(reasons)
    dialogue.call([error], (link.tool.name, arguments), is_mistake=True)


def _last_reply(box: Toolbox, result: Mapping[str, JSON]) -> str:
    values = box.values
    if not result:
        return values.pick(("Done.", "It is done.", "OK."))
    name, value = values.pick(list(result.items()))
    return values.pick((f"The {plain_label(values, name)} is {in_words(value)}.", in_words(value)))
