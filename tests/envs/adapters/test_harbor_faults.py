"""What a task's folder may hold, and what an agent may leave: each is played as Harbor does, or refused by name."""

from __future__ import annotations

import contextlib
import io
import logging
import tarfile
from pathlib import Path

import pytest

from agentgym.envs import make_env
from agentgym.envs.adapters.harbor import Harbor
from agentgym.envs.adapters.harbor_box import BoxSetup, read_setup
from agentgym.envs.adapters.harbor_shell import NotInBox, find_download, strip_installs
from agentgym.envs.adapters.harbor_task import read_harbor_tasks
from agentgym.errors import ConfigError
from tests.envs.adapters.harbor_folders import CONFIG, call_shell, finish, open_task, play_policy, write_task

REWARD = '"${AGENTGYM_ROOT-}/logs/verifier/reward.txt"'
SEVERAL_WAYS_OUT = {
    "an unreadable folder": "mkdir x; chmod 0 x",
    "a link for the verdict": 'cd "${AGENTGYM_ROOT-}/logs"; rm -rf verifier; ln -s ../app verifier',
    "a file for the verdict": 'cd "${AGENTGYM_ROOT-}/logs"; rm -rf verifier; echo x > verifier',
    "a folder for the log": 'mkdir -p "${AGENTGYM_ROOT-}/logs/verifier/test-stdout.txt"',
    "a verdict that is shut": 'chmod 500 "${AGENTGYM_ROOT-}/logs/verifier"',
    "no working folder": "rm -rf ../app/* ../app",
    "a file for the archive": "mkdir -p ~/.files.tar/x",
    "a full disk": "head -c 25000000 /dev/zero > large",
    "a program that prints": "echo 'print(\"x\" * 2000000)' > program.py",
    "a program that kills": "echo 'import os; os.kill(os.getppid(), 9)' > program.py",
    "a program that loops": "echo 'while True: pass' > program.py",
}
RUNS_A_PROGRAM = f"""\
#!/bin/sh
if [ -e program.py ]; then python3 program.py; fi
[ "$(cat answer.txt 2>/dev/null)" = 42 ] && reward=1 || reward=0
echo $reward > {REWARD}
"""
HEAD = "FROM python:3.12-slim\nWORKDIR /app\n"
NOT_FOLLOWED = {
    "FROM ghcr.io/acme/python-torch-cuda:2\n": "its image is ghcr.io/acme/python-torch-cuda:2",
    "FROM acme/ubuntu-postgres\n": "its image is acme/ubuntu-postgres",
    "FROM python:2.7\n": "its image is python:2.7",
    "FROM python:3.12-alpine\n": "its image is python:3.12-alpine",
    "# nothing\n": "does not begin with FROM",
    "FROM ubuntu\n": "its working folder is /",
    f'{HEAD}SHELL ["/bin/bash", "-c"]\n': "has SHELL",
    f'{HEAD}ENTRYPOINT ["/app/start.sh"]\n': "has ENTRYPOINT",
    f"{HEAD}ENV MSG it's fine\n": "which is not read",
    f"{HEAD}ENV MSG='$HOME'\n": "has a quoted",
    f"{HEAD}ENV MSG=${{X:?no}}\n": "has ${X:?no}",
    f"{HEAD}COPY it's.txt /app/\n": "which is not read",
    f"{HEAD}ADD a.tar.gz /app/\n": "unpacks a.tar.gz",
    f"{HEAD}RUN apt-get update; apt-get install -y no-such; echo hello > /app/made\n": "installs no-such",
    f"{HEAD}RUN apt-get update || true; useradd bob\n": "runs useradd",
    f"{HEAD}RUN echo x > /etc/made || true\n": "writes to /etc/made",
    f"{HEAD}RUN pip install -r no-such.txt\n": "installs with -r",
    f"{HEAD}RUN pip install -i https://a.org pip\n": "installs with -i",
    f"{HEAD}COPY requirements.txt .\nRUN pip install -r requirements.txt\n": "installs no-such==2",
    f"{HEAD}COPY d.csv /data\n": "writes to /",
}
FOLLOWED = {
    "FROM python:3.12-slim AS base\nWORKDIR /app\n": {},
    "FROM --platform=linux/amd64 python:3.12-slim\nWORKDIR /app\n": {},
    "ARG V=3.12\nFROM python:${V}-slim\nWORKDIR /app\nARG V\nENV A=$V\n": {"A": "3.12"},
    "\ufeffFROM\tpython:3.12\nWORKDIR\t/app\n": {},
    f"{HEAD}ENV MODE=${{MODE:-fast}} P=/app/${{X}}y\nARG Q=3\n": {"MODE": "fast", "P": "/app/y"},
    f"{HEAD}COPY *.csv /app/\n": {"file": "app/d.csv"},
    f"{HEAD}COPY d.csv /app\n": {"file": "app/d.csv"},
    f"{HEAD}RUN apt-get update; apt-get install -y bash # it's needed\n": {},
    f"{HEAD}RUN pip install --no-cache-dir pip >/dev/null; rm -f /app/x\n": {"run": " true ; rm -f /app/x"},
    f"{HEAD}RUN [ -d /app ] && echo hello > /app/out.txt\n": {"run": "[ -d /app ] && echo hello > /app/out.txt"},
}
DOWNLOADS = {
    "apt-get update\n": "apt-get",
    "true && DEBIAN_FRONTEND=x apt-get install -y curl": "apt-get",
    "curl -LsSf https://astral.sh/uv/install.sh | sh": "curl",
    "if x; then\n  uvx -p 3.13 pytest\nfi": "uvx",
    "git clone https://a.org/b": "git clone",
    "# curl https://a.org\ncommand -v uvx; echo 'apt-get update'; curl http://localhost:80/x; pytest /tests": "",
}


@pytest.mark.parametrize("way", SEVERAL_WAYS_OUT)
@pytest.mark.parametrize("backend", ["namespaces", "landlock"])
def test_no_agent_turns_its_zero_into_a_fault(tmp_path: Path, backend: str, way: str) -> None:
    write_task(tmp_path, tests__test_sh=RUNS_A_PROGRAM, task_toml=CONFIG.replace("= 20", "= 2"))
    with contextlib.closing(open_task(tmp_path, backend)) as env:
        call_shell(env, SEVERAL_WAYS_OUT[way])
        assert finish(env)[1:3] == (0.0, True)


def test_a_program_on_the_path_of_a_task_has_no_part_in_the_verdict(tmp_path: Path) -> None:
    lines = f'{HEAD}ENV PATH="/app/bin:$PATH"\nRUN mkdir -p /app/bin\n'
    write_task(tmp_path, environment__Dockerfile=lines, tests__test_sh=f"echo 0 > {REWARD}\n")
    with contextlib.closing(open_task(tmp_path)) as env:
        call_shell(env, "echo '{\"reward\": 1}' > /logs/verifier/reward.json")
        program = "#!/bin/sh\\necho 1 > /logs/verifier/reward.json\\n"
        call_shell(
            env, f"for name in rm mkdir tail cat tar; do printf '{program}' > bin/$name; chmod +x bin/$name; done"
        )
        assert finish(env)[1] == 0.0


def test_modes_times_and_shut_files_reach_the_verifier(tmp_path: Path) -> None:
    stat = "stat -c %a wide suid shut closed open | tr '\\n' ' '"
    test = f'[ "$({stat})" = "777 4755 0 0 777 " ] && [ b -nt a ] && echo 1 > {REWARD} || echo 0 > {REWARD}\n'
    solve = "touch wide suid shut a; chmod 777 wide; chmod 4755 suid; chmod 0 shut; mkdir -p closed/x; chmod 0 closed\n"
    write_task(tmp_path, tests__test_sh=test, solution__solve_sh=f"{solve}umask 0; mkdir open; sleep 0.05; touch b\n")
    with contextlib.closing(open_task(tmp_path)) as env:
        assert play_policy(env, "oracle", 0) == 1.0


@pytest.mark.parametrize("backend", ["namespaces", "landlock"])
def test_scripts_are_run_as_harbor_runs_them(tmp_path: Path, backend: str) -> None:
    root = '"${AGENTGYM_ROOT-}"'
    test = f"\ufeff#!/bin/bash\n[[ 1 == 1 ]] && {root}/tests/check && echo 1 > {REWARD} || echo 0 > {REWARD}\n"
    solve = f"[[ 1 == 1 ]] && ./run && echo 42 > {root}/logs/artifacts/out && sleep 0.6 && yes | head -c 2000000\n"
    write_task(
        tmp_path,
        environment__Dockerfile=f"{HEAD}COPY run ./\n",
        environment__run="#!/bin/sh\nexit 0\n",
        tests__check=f"#!/bin/sh\ngrep -q 42 {root}/logs/artifacts/out\n",
        tests__test_sh=test,
        solution__solve_sh=solve,
    )
    for name in ("environment/run", "tests/check"):
        (tmp_path / name).chmod(0o755)
    with contextlib.closing(open_task(tmp_path, backend, command_s=0.5)) as env:
        assert play_policy(env, "oracle", 0) == 1.0


def test_a_command_says_after_how_many_seconds_it_was_stopped(tmp_path: Path) -> None:
    write_task(tmp_path, task_toml=f"{CONFIG}[agent]\ntimeout_sec = 0.4\n")
    with contextlib.closing(open_task(tmp_path)) as env:
        assert "it was stopped after 0." in call_shell(env, "sleep 5")[0]


def test_temporary_files_are_apart_from_those_of_the_task(tmp_path: Path) -> None:
    with contextlib.closing(open_task(write_task(tmp_path))) as env:
        assert call_shell(env, "echo 42 > answer.txt; mktemp; rm -rf /tmp/* /dev/shm/*")[0].startswith("/tmp/")
        assert finish(env)[1] == 1.0


def _read(folder: Path) -> BoxSetup:
    return read_setup(read_harbor_tasks(str(folder))[0], (), "namespaces")


def _write_files(folder: Path, dockerfile: str) -> None:
    files = {"environment__d.csv": "1", "environment__requirements.txt": "pip\nno-such==2  # two\n"}
    write_task(folder, environment__Dockerfile=dockerfile, **files)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("x"))
    (folder / "environment" / "a.tar.gz").write_bytes(buffer.getvalue())


@pytest.mark.parametrize("dockerfile", NOT_FOLLOWED)
def test_what_a_box_cannot_do_exactly_is_named(tmp_path: Path, dockerfile: str) -> None:
    _write_files(tmp_path, dockerfile)
    with pytest.raises(NotInBox) as caught:
        _read(tmp_path)
    assert NOT_FOLLOWED[dockerfile] in str(caught.value)


@pytest.mark.parametrize("dockerfile", FOLLOWED)
def test_every_form_of_an_instruction_is_read(tmp_path: Path, dockerfile: str) -> None:
    _write_files(tmp_path, dockerfile)
    setup = _read(tmp_path)
    expected = dict(FOLLOWED[dockerfile])
    file, command = expected.pop("file", None), expected.pop("run", None)
    assert setup.env == expected and setup.workdir == "/app"
    assert [path for step in setup.steps if isinstance(step, dict) for path in step] == ([file] if file else [])
    assert setup.commands == ([command.strip()] if command else [])


def test_other_folders_than_a_box_has_are_named(tmp_path: Path) -> None:
    for number, change in enumerate(
        (
            {"instruction_md": "Write hello to /root/out.txt.\n"},
            {"tests__check.py": "open('/etc/hosts')\n"},
            {"solution__solve_sh": "touch /var/log/x\n"},
            {"instruction_md": "Run /usr/bin/no-such-program\n"},
        )
    ):
        with pytest.raises(NotInBox, match=r"the task names /.*, which a box does not have"):
            _read(write_task(tmp_path / str(number), **change))
    _read(write_task(tmp_path / "a", instruction_md="Run /usr/bin/env, and write /app/x, /tmp/y and /logs/agent/z.\n"))
    write_task(tmp_path / "b", **{"environment__.dockerignore": "x\n"})
    with pytest.raises(NotInBox, match=r"it has a \.dockerignore"):
        _read(tmp_path / "b")
    with pytest.raises(NotInBox, match="its verifier installs no-such"):
        _read(write_task(tmp_path / "c", tests__test_sh="pip install -q no-such\n"))


@pytest.mark.parametrize("script", DOWNLOADS)
def test_a_verifier_that_needs_a_network_is_refused_by_name(tmp_path: Path, script: str) -> None:
    assert find_download(script) == DOWNLOADS[script]
    write_task(tmp_path, tests__test_sh=script)
    if program := DOWNLOADS[script]:
        with pytest.raises(ConfigError, match=rf"test\.sh: the verifier runs {program}, which needs a network"):
            read_harbor_tasks(str(tmp_path))


def test_commands_that_need_not_be_run_keep_their_place() -> None:
    for text, commands in {
        "apt-get update && apt-get clean": "",
        "apt-get update || exit 1; echo 'a;b && c' # d": "true || exit 1; echo 'a;b && c'",
        "case x in x) true;; esac": "case x in x) true;; esac",
    }.items():
        assert " ".join(strip_installs(text, (), lambda _: None).split()) == commands


def test_a_broken_folder_is_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("good", "readme", "video", "link", "nested"):
        write_task(tmp_path / name, instruction_md=f"Write 42 to answer.txt ({name}).\n")
    (tmp_path / "readme" / "README.md").symlink_to("instruction.md")
    (tmp_path / "video" / "docs").mkdir()
    with open(tmp_path / "video" / "docs" / "video.bin", "wb") as file:
        file.truncate(70 << 20)
    (tmp_path / "link" / "instruction.md").unlink()
    (tmp_path / "link" / "instruction.md").symlink_to("task.toml")
    (tmp_path / "nested" / "task.toml").write_text(f"x = {'[' * 3000}{']' * 3000}\n")
    (tmp_path / "other").symlink_to("good")
    with caplog.at_level(logging.WARNING):
        env = make_env(f"harbor/{tmp_path}", {"backend": "namespaces"})
    assert sorted(task.name for task in read_harbor_tasks(str(tmp_path))) == ["good", "readme", "video"]
    lines = [record.getMessage() for record in caplog.records]
    assert [name for line in lines for name in ("link", "nested", "other") if f"/{name}" in line.split(" ")[2]] == [
        "link",
        "nested",
        "other",
    ]
    env.reset(seed=0)
    env.close()


def test_values_are_read_as_harbor_reads_them(tmp_path: Path) -> None:
    tables = '[agent]\nnetwork_mode = "public"\n[verifier.env]\nMODEL = "${MODEL:-gpt}"\nTEXT = "a${B}"\n'
    write_task(tmp_path, task_toml=f'version = "1.0"\n{tables}[environment]\nmemory = 512\n')
    (task,) = read_harbor_tasks(str(tmp_path))
    assert task.env_of("verifier") == {"MODEL": "gpt", "TEXT": "a${B}"} and task.memory_mb == 2048


def test_leaks_are_contents_and_not_shared_data(tmp_path: Path) -> None:
    table = "id,value\n1,1\n2,4\n3,9\n4,16\n"
    files = {"environment__input.csv": table, "tests__input.csv": table}
    heads = dict.fromkeys(("environment__a__init.py", "tests__init.py"), "# Copyright 2025 Example Corp.\n")
    assert Harbor(path=str(write_task(tmp_path / "a", **files, **heads))).leaks() == []
    body = "echo this is the very long answer > answer.txt\n"
    files = {"environment__hint.txt": body, "environment__b.json": '{"a":1,"b":[1,2,3,4,5,6]}'}
    files |= {"solution__solve_sh": f"#!/bin/sh\n{body}", "tests__c.json": '{"a": 1, "b": [1, 2, 3, 4, 5, 6]}\n'}
    assert Harbor(path=str(write_task(tmp_path / "b", **files))).leaks() == [
        "b: environment/hint.txt holds solution/solve.sh",
        "b: environment/b.json holds tests/c.json",
    ]
