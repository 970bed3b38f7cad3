"""The package as a user meets it: light to import, closed at its doors, whole in the wheel."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import agentgym

ROOT = Path(__file__).parent.parent
DOORS = ("envs", "tools", "chat_templates", "trainers")
HEAVY = {"huggingface_hub", "matplotlib", "ray", "rich", "safetensors", "tokenizers", "torch", "transformers", "tyro"}
HOOK = {"_agentgym_gymnasium.pth", "_agentgym_gymnasium.py", "_agentgym_gymnasium.start"}
EMBEDDED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
TORCH_USERS = (
    "agentgym.trainers",
    "agentgym.model.",
    "agentgym.engines.local.",
    "agentgym.engines.weights.",
    "agentgym.rewards.reward_model",
    "agentgym.rewards.verl_data",
    "agentgym.cli.",
)


def python(code: str, *, interpreter: str = sys.executable, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs `code` in an interpreter of its own, where a warning is an error."""
    command = [interpreter, "-W", "error", "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@functools.cache
def modules_after(statement: str) -> frozenset[str]:
    """Names in `sys.modules` after `statement`, in a fresh interpreter."""
    done = python(f"{statement}\nimport sys\nprint(*sys.modules)")
    assert done.returncode == 0, done.stderr
    return frozenset(done.stdout.split())


# ---- imports


@pytest.mark.parametrize("statement", ["import agentgym", "import gymnasium", "import gymnasium, agentgym.envs"])
def test_an_import_loads_nothing_heavy(statement: str) -> None:
    assert not modules_after(statement) & HEAVY


def test_environments_are_listed_without_servers_rollouts_and_torch() -> None:
    listed = "import io, contextlib\nfrom agentgym.cli.main import main\n"
    listed += "with contextlib.redirect_stdout(io.StringIO()): assert main(['env', 'list']) == 0"
    unneeded = HEAVY - {"rich", "tyro"} | {"aiohttp", "agentgym.rollout", "agentgym.chat_templates"}
    assert not modules_after(listed) & unneeded


def test_importing_the_package_imports_no_gymnasium_and_no_numpy() -> None:
    assert not modules_after("import agentgym") & {"gymnasium", "numpy"}


@pytest.mark.parametrize(
    "code",
    [
        "import gymnasium as g; g.make('agentgym:TextGame-v0')",
        "import agentgym as a, gymnasium as g; g.make('TextGame-v0')",
    ],
)
def test_gymnasium_makes_our_environments(code: str) -> None:
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_an_import_starts_no_thread_and_no_process() -> None:
    code = (
        "import threading, agentgym, multiprocessing as mp\nprint(threading.active_count(), len(mp.active_children()))"
    )
    assert python(code).stdout.split() == ["1", "0"]


@pytest.mark.long
def test_only_the_model_the_trainers_and_what_holds_weights_need_torch() -> None:
    # Read off the files: `pkgutil.walk_packages` would import the packages, those with torch too.
    paths = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "agentgym").rglob("*.py"))]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    # These need the library that an environment is served in, or that it comes from.
    of_libraries = ("agentgym.envs.exports.", "agentgym.envs.adapters.verifiers_process")
    light = [name for name in names if not name.startswith((*TORCH_USERS, *of_libraries))]
    assert len(light) > 400
    light += [f"agentgym.trainers.cluster.{name}" for name in ("episodes", "board", "engine_actor")]  # of workers
    missing = "import importlib, sys\nsys.modules.update(torch=None, safetensors=None)"
    code = f"{missing}\nfor name in {light}: importlib.import_module(name)"
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("door", DOORS)
def test_a_door_leads_into_the_package(door: str) -> None:
    assert (ROOT / door).is_symlink()
    assert os.readlink(ROOT / door) == f"agentgym/{door}"


@pytest.mark.parametrize("door", DOORS)
def test_a_door_is_no_import_name(door: str) -> None:
    done = python(f"import {door}")
    assert done.returncode == 1
    assert (
        f"ImportError: '{door}' is a door for readers of the repository; import agentgym.{door} instead" in done.stderr
    )


# ---- the distributions, built and installed as a user would


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", folder, ROOT],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def clean_python(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment that holds the wheel and its base dependencies alone."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=True)
    interpreter = str(home / "bin" / "python")
    pip = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wheel = next(distributions.glob("*.whl"))
    done = subprocess.run(
        [*pip, "-c", ROOT / "constraints.txt", wheel], capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return interpreter


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(distributions: Path) -> None:
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    expected = {"agentgym", *HOOK, f"agentgym_llm-{agentgym.__version__}.dist-info"}
    assert {name.split("/")[0] for name in names} == expected
    assert {"agentgym/py.typed", "agentgym/docs/README.md"} <= names
    kernels = Path(agentgym.__file__).parent / "engines" / "local" / "kernels"
    sources = {path.name for suffix in ("cpp", "h") for path in kernels.glob(f"*.{suffix}")}
    assert "decoder_step.cpp" in sources
    assert names >= {f"agentgym/engines/local/kernels/{name}" for name in sources}
    assert names >= {f"agentgym/embedded/{name}" for name in EMBEDDED}
    assert {"agentgym/cli/scaffolds/env.py.txt", "agentgym/cli/scaffolds/test_env.py.txt"} <= names


@pytest.mark.slow
def test_the_sdist_has_no_doors(distributions: Path) -> None:
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as sdist:
        members = sdist.getmembers()
    top_level = {member.name.split("/")[1] for member in members if "/" in member.name}
    assert not top_level & set(DOORS)
    assert top_level >= {"agentgym", "startup", "LICENSE", "CHANGELOG.md", "README.md", "SECURITY.md", "pyproject.toml"}
    assert not [member.name for member in members if member.issym()]


@pytest.mark.slow
def test_the_installed_package_needs_no_torch(clean_python: str, tmp_path: Path) -> None:
    code = "import importlib.util, agentgym\nprint(agentgym.__version__, importlib.util.find_spec('torch'))"
    done = python(code, interpreter=clean_python, cwd=tmp_path)
    assert done.stdout.split() == [agentgym.__version__, "None"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_an_installed_package_brings_no_door(door: str, clean_python: str, tmp_path: Path) -> None:
    done = python(f"import {door}", interpreter=clean_python, cwd=tmp_path)
    assert f"ModuleNotFoundError: No module named '{door}'" in done.stderr


@pytest.mark.slow
def test_gymnasium_makes_our_environments_by_name(clean_python: str, tmp_path: Path) -> None:
    code = "import gymnasium\nenv = gymnasium.make('TextGame-v0')\nprint(env.reset(seed=1)[0])\nenv.close()"
    done = python(code, interpreter=clean_python, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
def test_each_command_of_doctor_works_on_a_bare_installation(distributions: Path, tmp_path: Path) -> None:
    """Runs them as they are printed, system packages apart, until there is nothing left to run."""
    home = tmp_path / "home"
    venv.create(home / "env", with_pip=True)
    python, wheel = home / "env" / "bin" / "python", next(distributions.glob("*.whl"))
    install = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel]
    subprocess.run(install, timeout=1800, check=True)
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "matplotlib"], timeout=300, check=True)

    def doctor() -> tuple[int, dict[str, Any]]:
        words, env = [home / "env" / "bin" / "agentgym", "doctor", "--json"], {**os.environ, "HOME": str(home)}
        done = subprocess.run(words, cwd=home, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    def commands(answer: dict[str, Any]) -> dict[str, str]:
        commands_by_part = {fix["what"]: fix["command"] for fix in answer["fixes"] if fix["command"]}
        return {what: line for what, line in commands_by_part.items() if str(home) in line}

    code, before = doctor()
    assert code == 1 and not before["ok"] and before["engines"] == ["scripted", "openai"]
    todo = commands(before)
    assert todo.keys() >= {"matplotlib missing", "torch missing", "ray is not installed"}
    for line in todo.values():
        done = subprocess.run(["bash", "-c", line], cwd=home, capture_output=True, text=True, timeout=1800, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    code, after = doctor()
    assert code == 0 and after["ok"] and not commands(after)
    assert after["engines"] == ["scripted", "openai", "local", "sglang", "vllm"]
    shutil.rmtree(home)  # gigabytes, which pytest would keep


@pytest.mark.slow
def test_uninstalling_takes_the_hook_away(distributions: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "home", with_pip=True)
    pip = [tmp_path / "home" / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = next(distributions.glob("*.whl"))
    site_packages = next((tmp_path / "home").glob("lib/python*/site-packages"))
    subprocess.run([*pip, "install", "--no-deps", wheel], timeout=300, check=True)
    assert {path.name for path in site_packages.iterdir()} >= HOOK
    subprocess.run([*pip, "uninstall", "--yes", "agentgym-llm"], timeout=300, check=True)
    assert not [path for path in site_packages.rglob("*agentgym*") if path.is_file()]


@pytest.mark.slow
def test_the_installed_command_answers_without_torch(clean_python: str, tmp_path: Path) -> None:
    for words, text in ((["--help"], "train"), (["docs"], "success_stays_zero.md"), (["docs", "tools"], "# Tools")):
        command = [Path(clean_python).parent / "agentgym", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert text in done.stdout
