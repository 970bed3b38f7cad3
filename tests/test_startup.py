"""The start-up hook: `import gymnasium` alone finds the environments, and nothing else notices the hook.

These tests need agentgym to be installed (`make install`), as the hook is a file of the installation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.envs.catalog.plugin import BUNDLED

SOURCE = Path(__file__).parent.parent / "startup" / "_agentgym_gymnasium.py"


def python(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs an interpreter away from the repository, so that only what is installed is found."""
    environment = {**{key: value for key, value in os.environ.items() if key != "PYTHONPATH"}, **environ}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


def printed(code: str, cwd: Path) -> str:
    done = python("-W", "error", "-c", code, cwd=cwd)
    assert done.returncode == 0, f"{done.stderr}\nIs agentgym installed in this environment? `make install`"
    return done.stdout.strip()


def test_importing_gymnasium_is_enough(tmp_path: Path) -> None:
    code = "import gymnasium; e = gymnasium.make('TextGame-v0'); print(e.reset(seed=1)[0])"
    assert printed(code, tmp_path).startswith("Quest: ")


def test_every_bundled_environment_is_registered_and_none_is_loaded(tmp_path: Path) -> None:
    code = (
        "import gymnasium, sys\nprint(*(spec.id for spec in gymnasium.registry.values() if 'agentgym' in str(spec)))\n"
        "print(*(name for name in sys.modules if name.startswith('agentgym')))"
    )
    ids, modules = printed(code, tmp_path).splitlines()
    assert ids.split() == list(BUNDLED)
    assert set(modules.split()) == {
        "agentgym",
        "agentgym.envs",
        "agentgym.envs.catalog",
        "agentgym.envs.catalog.plugin",
        "agentgym.lazy_exports",
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "imports",
    [
        "import agentgym, gymnasium",
        "import gymnasium, agentgym",
        "import agentgym.envs.catalog.plugin, gymnasium",
        "from agentgym.envs import ToolEnv; import gymnasium",
        "import importlib.util; importlib.util.find_spec('gymnasium'); import gymnasium",
        "import gymnasium; import importlib; importlib.reload(gymnasium)",
    ],
)
def test_the_order_of_imports_does_not_matter(imports: str, tmp_path: Path) -> None:
    assert printed(f"{imports}\nprint(gymnasium.make('GuessNumber-v0').spec.id)", tmp_path) == "GuessNumber-v0"


def test_threads_that_import_both_at_once_agree(tmp_path: Path) -> None:
    code = (
        "import importlib, threading\n"
        "names = ['gymnasium', 'agentgym', 'agentgym.envs.games.text_game.env', 'agentgym.envs.catalog.plugin'] * 4\n"
        "threads = [threading.Thread(target=importlib.import_module, args=(name,)) for name in names]\n"
        "[thread.start() for thread in threads]; [thread.join(60) for thread in threads]\n"
        "import gymnasium; print(gymnasium.make('TextGame-v0').spec.id)"
    )
    assert printed(code, tmp_path) == "TextGame-v0"


def test_the_hook_goes_away_when_its_work_is_done(tmp_path: Path) -> None:
    code = (
        "import sys; watching = [f for f in sys.meta_path if 'agentgym' in getattr(f, '__module__', '')]\n"
        "import gymnasium; print(len(watching), watching[0] in sys.meta_path)\n"
        "print('exec_module' in vars(gymnasium.__spec__.loader))"
    )
    assert printed(code, tmp_path).split() == ["1", "False", "False"]


def test_a_program_without_gymnasium_imports_no_agentgym(tmp_path: Path) -> None:
    done = python("-X", "importtime", "-c", "import json", cwd=tmp_path)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert {name for name in imported if "agentgym" in name} == {"_agentgym_gymnasium"}
    assert not imported & {"typing", "warnings", "gymnasium", "numpy"}


@pytest.mark.parametrize("flags", [(), ("-W", "error::UserWarning")], ids=["plain", "warnings are errors"])
@pytest.mark.parametrize("fault", ["OSError('disk on fire')", "SystemExit(3)"])
def test_a_broken_agentgym_is_a_warning_and_gymnasium_works(fault: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "agentgym").mkdir()
    (tmp_path / "agentgym" / "__init__.py").write_text(f"raise {fault}", encoding="utf-8")
    code = "import gymnasium; print(gymnasium.make('CartPole-v1').spec.id)"
    done = python(*flags, "-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "CartPole-v1"), done.stderr
    assert f"agentgym's environments are not registered with Gymnasium: {fault}" in done.stderr


def test_a_failing_import_of_gymnasium_fails_as_it_would_and_can_be_tried_again(tmp_path: Path) -> None:
    (tmp_path / "gymnasium").mkdir()
    (tmp_path / "gymnasium" / "__init__.py").write_text("import no_such_module", encoding="utf-8")
    code = (
        "import sys\n"
        "try: import gymnasium\n"
        "except ModuleNotFoundError as error: print(error.name)\n"
        "del sys.path[0]; sys.path_importer_cache.clear()\n"
        "import gymnasium; print(gymnasium.make('TextGame-v0').spec.id)"
    )
    assert printed(code, tmp_path).split() == ["no_such_module", "TextGame-v0"]


def test_the_installed_hook_is_the_one_in_the_repository(tmp_path: Path) -> None:
    installed = Path(printed("import _agentgym_gymnasium; print(_agentgym_gymnasium.__file__)", tmp_path)).parent
    for source in SOURCE.parent.glob("_agentgym_gymnasium.*"):
        text = (installed / source.name).read_text(encoding="utf-8")
        assert text == source.read_text(encoding="utf-8"), "the hook has changed: run `make install`"


def test_the_start_file_names_the_call_that_the_pth_file_makes(tmp_path: Path) -> None:
    start = SOURCE.with_suffix(".start").read_text(encoding="utf-8").strip()
    module, _, function = start.partition(":")
    assert SOURCE.with_suffix(".pth").read_text(encoding="utf-8").strip() == f"import {module}; {module}.{function}()"
    code = (  # as Python 3.15 does: the entry point is resolved and called, in an interpreter that read no .pth file
        f"import pkgutil, sys; sys.path.append({str(SOURCE.parent)!r})\n"
        f"[pkgutil.resolve_name({start!r})() for _ in range(2)]\n"
        "print([getattr(finder, '__name__', '') for finder in sys.meta_path].count('GymnasiumWatch'))"
    )
    done = python("-S", "-c", code, cwd=tmp_path)
    assert done.stdout.strip() == "1", done.stderr


def test_where_the_hook_cannot_run_importing_agentgym_after_gymnasium_registers(tmp_path: Path) -> None:
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'agentgym' not in getattr(f, '__module__', '')]\n"
        "import gymnasium, agentgym; print(gymnasium.make('TextGame-v0').spec.id)"
    )
    assert printed(code, tmp_path) == "TextGame-v0"
