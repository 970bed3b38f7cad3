"""A small made-up world, described in pages that refer to each other, and questions that lead from page to page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from agentgym.tools.search import Document

__all__ = ["Question", "SearchWorld", "draw_search_question", "make_search_world"]

HOST = "https://atlas.example"
SHARES = {"person": 8, "town": 4, "company": 2, "river": 2}
"""The number of pages of each kind among sixteen."""
BEGINNINGS = "Bra Cel Dor Fen Gil Hal Ist Jor Kes Lum Mor Nev Orl Pel Quil Ras Sil Tam Ulv Ves Wen Yar Zel".split()
ENDINGS = "ada ben dric eth gard ira kin lo mond nis or quist row sa tin und vane wick xar yle".split()
TOWNS = "Upper Lower Port Old New Great Little Nether".split()
COMPANIES = "Mills Shipping Glassworks Printers Brewery Foundry".split()
TRADES = "a glassblower, a surveyor, a clockmaker, a botanist, a ferryman, a printer, a cellist, a baker".split(", ")


@dataclass(frozen=True)
class Relation:
    """A relation between two pages: the sentence of the page, and the phrase of a question."""

    subject: str
    object: str
    phrase: str
    """`the mayor of {}`: the object, by the subject."""
    fact: str
    """`The mayor of {subject} is {object}.`"""


RELATIONS = (
    Relation("person", "town", "the town in which {} was born", "{subject} was born in {object}."),
    Relation("person", "company", "the company that {} works for", "{subject} works for {object}."),
    Relation("person", "person", "the teacher of {}", "The teacher of {subject} was {object}."),
    Relation("town", "person", "the mayor of {}", "The mayor of {subject} is {object}."),
    Relation("town", "river", "the river on which {} lies", "{subject} lies on the {object}."),
    Relation("company", "person", "the founder of {}", "The founder of {subject} was {object}."),
    Relation("company", "town", "the town in which {} has its seat", "{subject} has its seat in {object}."),
    Relation("river", "town", "the town at the mouth of {}", "The town at the mouth of the {subject} is {object}."),
    Relation("river", "person", "the first to map {}", "The first to map the {subject} was {object}."),
)


@dataclass(frozen=True)
class Entity:
    """Something with a page of its own: `Entity("town", "Port Kesrow")`. Every name has two words."""

    kind: str
    name: str

    @property
    def url(self) -> str:
        """The address of its page."""
        return f"{HOST}/{self.kind}/{self.name.replace(' ', '_')}"


@dataclass(frozen=True)
class SearchWorld:
    """Entities, and the object of each of their relations."""

    entities: tuple[Entity, ...]
    facts: dict[tuple[Entity, Relation], Entity] = field(repr=False)
    pages: tuple[Document, ...] = field(repr=False)


@dataclass(frozen=True)
class Question:
    """A question whose answer is found by reading the pages of `path`, each of which names the next.

    The last one is asked for.
    """

    text: str
    path: tuple[Entity, ...]

    @property
    def answer(self) -> str:
        """The name that is asked for."""
        return self.path[-1].name


def make_search_world(draw: np.random.Generator, num_pages: int) -> SearchWorld:
    """A world of about `num_pages` pages; names share their words, so that a search finds namesakes, too."""
    entities: list[Entity] = []
    stems = _shuffle_items(draw, [f"{first}{last}" for first, last in product(BEGINNINGS, ENDINGS)])
    for kind, share in SHARES.items():
        count = max(3, num_pages * share // sum(SHARES.values()))
        entities += [Entity(kind, name) for name in _names(draw, kind, count, stems)]
    facts: dict[tuple[Entity, Relation], Entity] = {}
    for entity in entities:
        for relation in RELATIONS:
            if relation.subject == entity.kind:
                others = [other for other in entities if other.kind == relation.object and other != entity]
                facts[entity, relation] = others[int(draw.integers(len(others)))]
    pages = [_page(draw, entity, facts) for entity in entities]
    return SearchWorld(tuple(entities), facts, tuple(pages[index] for index in draw.permutation(len(pages))))


def draw_search_question(draw: np.random.Generator, world: SearchWorld, num_hops: int) -> Question:
    """A question of `num_hops` steps from a page that it names; no page comes twice."""
    while True:
        path = [world.entities[int(draw.integers(len(world.entities)))]]
        text = path[0].name
        for _ in range(num_hops):
            choices = [option for option in RELATIONS if option.subject == path[-1].kind]
            relation = choices[int(draw.integers(len(choices)))]
            path.append(world.facts[path[-1], relation])
            text = relation.phrase.format(text)
        if len(set(path)) == num_hops + 1:
            return Question(f"What is the name of {text}?", tuple(path))


def _shuffle_items(draw: np.random.Generator, items: list[str]) -> Iterator[str]:
    return iter([items[index] for index in draw.permutation(len(items))])


def _names(draw: np.random.Generator, kind: str, count: int, stems: Iterator[str]) -> list[str]:
    if kind == "river":
        return [f"River {next(stems)}" for _ in range(count)]
    size = int(np.ceil(np.sqrt(2 * count)))  # so few words that each is in several names
    firsts = [next(stems) for _ in range(size)]
    lasts = [next(stems) for _ in range(size)] if kind == "person" else []
    pairs = {
        "person": [f"{first} {last}" for first, last in product(firsts, lasts)],
        "town": [f"{part} {stem}" for part, stem in product(TOWNS, firsts)],
        "company": [f"{stem} {part}" for stem, part in product(firsts, COMPANIES)],
    }
    names = _shuffle_items(draw, pairs[kind])
    return [next(names) for _ in range(count)]


def _page(draw: np.random.Generator, entity: Entity, facts: dict[tuple[Entity, Relation], Entity]) -> Document:
    name = entity.name
    number = int(draw.integers(2, 900))
    about = {
        "person": f"{name} is {TRADES[int(draw.integers(len(TRADES)))]}, known for a collection of {number} shells.",
        "town": f"{name} is a town of {number * 10} people.",
        "company": f"{name} is a company with {number} workers.",
        "river": f"The {name} is {number} miles long.",
    }
    sentences = [
        relation.fact.format(subject=name, object=facts[entity, relation].name)
        for relation in RELATIONS
        if relation.subject == entity.kind
    ]
    return Document(entity.url, name, " ".join([about[entity.kind], *_shuffle_items(draw, sentences)]))
