"""The words of the package: names that state a purpose, and docstrings that can be read on their own."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.syntax_trees import parse_file, walk_nodes

ROOT = Path(__file__).parent.parent
FOLDERS = ("agentgym", "benchmarks", "docs", "examples", "startup")
IRREGULAR = set(
    "begun bought bound broken brought built caught chosen done drawn driven fallen fed felt forgotten found given "
    "gone grown had heard held hidden kept known laid led left lent lost made meant met paid said seen sent shown shut "
    "spelt spent spoken spun stood stuck sworn taken taught thought told torn understood won worn wound woven "
    "written".split()
)
VERBS = set("bleed breed embed exceed feed heed need proceed seed shed speed succeed".split())
"""Words on -ed that are no participles, and nouns."""
PARTICIPLES_ALLOWED = {"done"}
"""Tools whose names reach a model."""
STATES = set("asked found given held kept known made named read said sent shown taken told wanted".split())
"""Participles that say what happened to a value: a variable is named by the noun for what it holds."""
STATES_ALLOWED = {"agentgym/evaluation/play/chat.py: said"}
"""A parameter that users may name."""
SHARED_NAMES = {"gpg", "main", "names", "tool"}
"""An advantage and a loss of one paper, commands' entry points, what adapters are asked for by name, and overloads."""
FRAGMENT = re.compile(
    r"(Of|By|Likewise|As|For|In|On|To|With|Without|From|At|Beside|Behind|Around|Out|Where|Who|Whose|None)\b"
)
QUESTION = re.compile(r"(What|Whether|How|Where|Who|Which|When|Of|By)\b")
MAX_QUESTIONS = 0.03


def files(folders: Sequence[str] = FOLDERS) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def is_lone_participle(name: str) -> bool:
    word = name.strip("_")
    if "_" in word or word in VERBS:
        return False
    return word in IRREGULAR or word.endswith("ed")


def is_state(name: str) -> bool:
    """Returns whether a name is such a participle, apart from a shape suffix, `_` and capitals."""
    return re.sub(r"(?<=[a-z])_[A-Z0-9]+$", "", name.strip("_")).lower() in STATES


def bound_name(node: ast.Name | ast.Attribute | ast.arg) -> str:
    """Returns the name that a node binds, or an empty text; a public attribute may reach users."""
    if isinstance(node, ast.arg):
        return node.arg
    name = node.id if isinstance(node, ast.Name) else node.attr
    return name if isinstance(node.ctx, ast.Store) and (isinstance(node, ast.Name) or name[0] == "_") else ""


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yields the line and text of each docstring: of modules, classes, functions and of what is assigned."""
    for node in nodes:
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in zip([None, *body], body, strict=False):
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            text = statement.value.value
            is_first = before is None and isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            )
            if isinstance(text, str) and (is_first or isinstance(before, ast.Assign | ast.AnnAssign)):
                yield statement.lineno, text.strip()


def field_targets(node: ast.ClassDef) -> Iterator[ast.expr]:
    """Yields what a class assigns: its fields may have names that reach users and files."""
    for statement in node.body:
        yield from statement.targets if isinstance(statement, ast.Assign) else ()
        if isinstance(statement, ast.AnnAssign):
            yield statement.target


@functools.cache
def offences(path: Path) -> tuple[tuple[str, int, str], ...]:
    return tuple(read_offences(path))


def read_offences(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yields each offence of a file: its kind, its line, and the name or the first words.

    Yields each docstring and each public name of the module too: a file is parsed once for all the tests.
    """
    tree = parse_file(path)
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and statement.name[0] != "_":
            yield "public", statement.lineno, statement.name
    nodes = list(walk_nodes(tree))
    fields = {id(target) for node in nodes if isinstance(node, ast.ClassDef) for target in field_targets(node)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if is_lone_participle(node.name) and node.name not in PARTICIPLES_ALLOWED:
                yield "participle", node.lineno, node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in ("one", "it"):
            yield "one", node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in ("one", "it"):
            yield "one", node.lineno, node.arg
        if (
            isinstance(node, ast.Name | ast.Attribute | ast.arg)
            and id(node) not in fields
            and is_state(bound_name(node))
        ):
            yield "state" if bound_name(node) in STATES else "marked state", node.lineno, bound_name(node)
    for line, text in docstrings(nodes):
        yield "docstring", line, text[:60]
        if FRAGMENT.match(text):
            yield "fragment", line, text[:60]
        elif QUESTION.match(text):
            yield "question", line, text[:60]


def lines_of(kind: str, folders: Sequence[str] = FOLDERS) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files(folders)
        for what, line, text in offences(path)
        if what == kind
    ]


def test_no_function_is_named_by_a_lone_participle() -> None:
    assert lines_of("participle") == []


def test_no_loop_variable_or_parameter_is_called_one_or_it() -> None:
    assert lines_of("one", (*FOLDERS, "tests")) == []


def test_a_variable_is_named_by_what_it_holds() -> None:
    names = lines_of("state", (*FOLDERS, "tests"))
    assert [line for line in names if re.sub(r":\d+", "", line) not in STATES_ALLOWED] == []


def test_private_attributes_constants_and_names_with_a_shape_suffix_are_nouns() -> None:
    assert lines_of("marked state") == []


def test_names_of_tests_are_short_and_their_tensors_are_named_by_nouns() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in files(["tests"])}
    assert [name for text in texts.values() for name in re.findall(r"def (test_\w{76,})", text)] == []
    tensor = re.compile(rf"(?<![.\w])(?:{'|'.join(STATES)})_[A-Z]+\b")
    assert [name for text in texts.values() for name in tensor.findall(text)] == []


def test_no_docstring_only_refers_to_another() -> None:
    assert [line for line in lines_of("docstring") if re.search(r": See `[^`]+`\.$", line)] == []


def test_no_docstring_is_a_fragment() -> None:
    assert lines_of("fragment") == []


def test_a_public_name_means_one_thing_in_the_package() -> None:
    places: dict[str, set[Path]] = defaultdict(set)
    for path in (ROOT / "agentgym").rglob("*.py"):
        for kind, _, name in offences(path):
            if kind == "public":
                places[name].add(path.relative_to(ROOT))
    assert len(places) > 1000
    assert {name: paths for name, paths in places.items() if len(paths) > 1 and name not in SHARED_NAMES} == {}


def test_few_docstrings_begin_as_a_question() -> None:
    num = len(lines_of("docstring"))
    questions = lines_of("question")
    assert num > 3000
    assert len(questions) <= MAX_QUESTIONS * num, questions
