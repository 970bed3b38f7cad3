"""The rooms of the package: no circle of imports between them, also of those by name, and no crowded folder."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

from tests.syntax_trees import parse_file, walk_nodes, walk_statements

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "agentgym"
FULLEST = 20
CROWDED = {"agentgym/cli": 37, "agentgym/chat_templates/formats": 37}
"""Folders of many equal parts, a command or a family each."""


def imported_modules(path: Path) -> set[str]:
    """Returns our modules that a file imports, by a statement or by `import_module`, wherever in the file."""
    names = set()
    tree = parse_file(path)
    has_calls = "import_module" in path.read_text(encoding="utf-8")
    for node in walk_nodes(tree) if has_calls else walk_statements(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and calls_import_module(node.func):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return {name for name in names if name.startswith("agentgym.")}


def calls_import_module(function: ast.expr) -> bool:
    """Returns True for `import_module` and `importlib.import_module`, and for what is called on their result."""
    return any("import_module" in getattr(node, "id", "") + getattr(node, "attr", "") for node in ast.walk(function))


def test_no_room_is_in_a_circle_of_imports() -> None:
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graphs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    num_by_name = 0
    for name, path in modules.items():
        num_by_name += "import_module(" in path.read_text(encoding="utf-8")
        for imported_name in imported_modules(path) & modules.keys():
            ours, theirs = name.split("."), imported_name.split(".")
            shared = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            if shared is not None:
                graphs[".".join(ours[:shared])][ours[shared]].add(theirs[shared])
    assert num_by_name > 5 and len(graphs) > 20
    for graph in graphs.values():
        TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_no_folder_is_crowded() -> None:
    files = Counter(str(path.parent.relative_to(ROOT)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert {folder: n for folder, n in files.items() if n > FULLEST and n > CROWDED.get(folder, 0)} == {}


def test_every_path_that_a_page_names_is_there() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    paths = {(page.name, path) for page in pages for path in re.findall(r"agentgym/[\w/]+\.\w+", page.read_text())}
    assert {(page, path) for page, path in paths if not (ROOT / path).exists()} == set()
