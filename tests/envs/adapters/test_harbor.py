"""Tasks in Harbor's form, played in the boxes of this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

import psutil
import pytest

from agentgym.cli.main import main
from agentgym.envs import Action, make_env, policy_for
from agentgym.envs.adapters.harbor import Harbor
from agentgym.envs.adapters.harbor_box import NotInBox, read_setup
from agentgym.envs.adapters.harbor_task import REFUSED, VERSIONS, read_harbor_tasks
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.testing import examine_env
from agentgym.types import Message
from tests.envs.adapters.harbor_folders import (
    CONFIG,
    TASK_FOLDERS,
    call_shell,
    finish,
    open_task,
    play_policy,
    write_task,
)

BOXES = ("namespaces", "landlock")
REWARD = '"${AGENTGYM_ROOT-}/logs/verifier/reward.txt"'
JSON_REWARD = '"${AGENTGYM_ROOT-}/logs/verifier/reward.json"'
NEEDS = {
    "steps": '[[steps]]\nname = "one"\n',
    "environment.gpus": "[environment]\ngpus = 1\n",
    "environment.tpu": '[environment.tpu]\ntype = "v6e"\n',
    "environment.mcp_servers": '[[environment.mcp_servers]]\nname = "a"\n',
    "environment.skills_dir": '[environment]\nskills_dir = "/skills"\n',
    "environment.healthcheck": '[environment.healthcheck]\ncommand = "true"\n',
    "environment.allowed_hosts": '[environment]\nallowed_hosts = ["a.org"]\n',
    "environment.network_mode": '[environment]\nnetwork_mode = "allowlist"\n',
    "environment.os": '[environment]\nos = "windows"\n',
    "agent.network_mode": '[environment]\nnetwork_mode = "no-network"\n[agent]\nnetwork_mode = "public"\n',
    "agent.user": "[agent]\nuser = 0\n",
    "verifier.network_mode": '[verifier]\nnetwork_mode = "allowlist"\n',
    "verifier.user": '[verifier]\nuser = "root"\n',
    "verifier.environment": "[verifier.environment]\ncpus = 1\n",
    "verifier.environment_mode": '[verifier]\nenvironment_mode = "separate"\n',
    "verifier.collect": '[[verifier.collect]]\ncommand = "true"\n',
}
WRONG = {
    "schema_version = 2": "schema_version: 2 is not read",
    'version = "0.9"': "schema_version: '0.9' is not read; 1.0, ",
    "[verifier": "cannot be read",
    "verifier = 3": "verifier: a table is expected, got 3",
    '[agent]\ntimeout_sec = "soon"': "agent.timeout_sec: a positive number is expected, at most 1e+08, got 'soon'",
    "[environment]\nmemory_mb = -1": "environment.memory_mb: a positive number",
    "[verifier]\ntimeout_sec = 1e10": "verifier.timeout_sec: a positive number is expected, at most 1e+08, got 1000",
    '[environment]\nmemory = "2G"\nmemory_mb = 512': "environment.memory: 2G is not the 512 of memory_mb",
    f"x = {'[' * 3000}{']' * 3000}": "cannot be read: ",
    '[environment]\nmemory = "much"': "environment.memory: a size such as 2G",
    '[verifier.env]\nKEY = "${KEY}"': "verifier.env.KEY: it is a variable of this machine",
    '[verifier.env]\n"a b" = "c"': "'a b' cannot be the name of a variable",
    '[verifier.env]\n"é" = "c"': "'é' cannot be the name of a variable",
    "[verifier.env]\nKEY = 3": "verifier.env: a table of texts",
}


@pytest.mark.parametrize("key", NEEDS)
def test_what_cannot_be_played_is_refused_by_its_key(tmp_path: Path, key: str) -> None:
    write_task(tmp_path, task_toml=NEEDS[key])
    with pytest.raises(ConfigError, match=rf"task\.toml: {key}: the task needs "):
        make_env(f"harbor/{tmp_path}")


def test_every_refused_key_is_tried() -> None:
    assert set(REFUSED) <= set(NEEDS)


@pytest.mark.parametrize("text", WRONG)
def test_a_broken_file_is_one_line_with_file_and_key(tmp_path: Path, text: str) -> None:
    write_task(tmp_path, task_toml=f"{text}\n")
    with pytest.raises(ConfigError) as caught:
        make_env(f"harbor/{tmp_path}")
    assert "task.toml" in str(caught.value) and WRONG[text] in str(caught.value) and "\n" not in str(caught.value)


def test_every_version_is_read_with_its_limits(tmp_path: Path) -> None:
    for version in VERSIONS:
        for key in ("version", "schema_version"):
            sizes = 'allow_internet = true\nmemory = "1G"\nstorage = "512M"\ncpus = 2\n'
            write_task(tmp_path, task_toml=f'{key} = "{version}"\n[environment]\n{sizes}[agent]\ntimeout_sec = 5\n')
            (task,) = read_harbor_tasks(str(tmp_path))
            limits = (task.memory_mb, task.storage_mb, task.cpus, task.agent_timeout_s, task.verifier_timeout_s)
            assert limits == (1024, 512, 2.0, 5.0, 600.0)


def test_unknown_keys_are_kept_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_task(tmp_path, task_toml=f"colour = 3\n{CONFIG}smell = 4\n")
    with caplog.at_level(logging.WARNING):
        (task,) = read_harbor_tasks(str(tmp_path))
        read_harbor_tasks(str(tmp_path))
    assert task.config["colour"] == 3
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["colour, environment.smell"]


def test_a_folder_without_its_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        read_harbor_tasks(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"has no task\.toml, and none of its folders has one"):
        read_harbor_tasks(str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no tests/test\.sh"):
        read_harbor_tasks(str(write_task(tmp_path / "a", tests__test_sh=None)))
    with pytest.raises(ConfigError, match=r"docker-compose\.yaml: several containers"):
        read_harbor_tasks(str(write_task(tmp_path / "b", **{"environment__docker-compose.yaml": "services: {}"})))
    with pytest.raises(ConfigError, match=r"has no environment/Dockerfile, and task\.toml names no"):
        read_harbor_tasks(str(write_task(tmp_path / "d", environment__Dockerfile=None)))
    tasks = read_harbor_tasks(str(write_task(tmp_path / "c").parent))
    assert [task.name for task in tasks] == ["c"]  # the others are left out


@pytest.mark.parametrize("name", ["environment", "tests", "solution"])
def test_links_are_refused(tmp_path: Path, name: str) -> None:
    write_task(tmp_path)
    (tmp_path / name / "link").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="link is a link or a special file"):
        read_harbor_tasks(str(tmp_path))


def test_the_line_of_a_data_set_is_not_shown(tmp_path: Path) -> None:
    write_task(tmp_path, instruction_md="<!-- canary GUID 1 -->\n# a canary too\n\nDo it.\n")
    assert read_harbor_tasks(str(tmp_path))[0].instruction == "Do it.\n"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("FROM nvidia/cuda:12\n", "its image is nvidia/cuda:12"),
        ("FROM ubuntu AS a\nFROM debian\n", "several stages"),
        ("FROM ubuntu\nRUN apt-get update && apt-get install -y no-such-package\n", "installs no-such-package"),
        ("FROM ubuntu\nRUN pip install no-such-library==1.0\n", "installs no-such-library"),
        ("FROM ubuntu\nRUN curl -O https://a.org/b\n", "runs curl"),
        ("FROM ubuntu\nRUN cat <<EOF > /app/x\na\nEOF\n", "texts of several lines"),
        ("FROM ubuntu\nCOPY a.txt /etc/a.txt\n", "writes to /etc"),
        ("FROM ubuntu\nCOPY a.txt ../../etc/a.txt\n", "writes to "),
        ("FROM ubuntu\nCOPY ../solution /app/\n", "copies ../solution, which is no file of its environment"),
        ("FROM ubuntu\nCOPY --from=x a.txt /app/\n", "COPY --from=x"),
        ("FROM ubuntu\nADD https://a.org/b /app/\n", "copies https://a.org/b"),
        ("FROM ubuntu\nVOLUME /x\n", "has VOLUME"),
        ("FROM ubuntu\nCOPY a.txt /a.txt\n", "writes to /"),
        ("FROM ubuntu\nCOPY a.txt .\n", "writes to /"),
        ("FROM ubuntu\nWORKDIR /root\n", "writes to /root"),
    ],
)
def test_a_box_says_what_it_lacks_for_a_dockerfile(tmp_path: Path, lines: str, reason: str) -> None:
    write_task(tmp_path, environment__Dockerfile=lines, **{"environment__a.txt": "a"})
    with pytest.raises(NotInBox, match=reason.replace(".", r"\.")):
        read_setup(read_harbor_tasks(str(tmp_path))[0], (), "namespaces")
    with pytest.raises(ConfigError, match="namespaces can be the machine of no task of "):
        make_env(f"harbor/{tmp_path}", {"backend": "namespaces"})


def test_landlock_refuses_a_task_that_names_paths_below_the_root(tmp_path: Path) -> None:
    write_task(tmp_path, instruction_md="Write 42 to /app/answer.txt.\n")
    with pytest.raises(ConfigError, match=r"landlock has no root of its own, and the task names /app"):
        make_env(f"harbor/{tmp_path}", {"backend": "landlock"})


def test_a_dockerfile_is_followed_in_a_box(tmp_path: Path) -> None:
    lines = """
    # a comment
    FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04:2025
    ENV GREETING="hello world" DEBIAN_FRONTEND=noninteractive
    ENV OLD form
    RUN apt-get update && apt-get install -y python3-pip && \\
        ln -s /usr/bin/python3 /usr/bin/python && rm -rf /var/lib/apt/lists/*
    RUN mkdir -p /home/user/in && echo "$GREETING" > /home/user/in/made
    COPY data /data/
    ADD data/one.txt /tmp/other.txt
    WORKDIR /app
    COPY --chmod=755 run.sh data/one.txt ./
    WORKDIR /home/user
    COPY run.sh renamed
    """
    write_task(
        tmp_path,
        environment__Dockerfile=lines,
        environment__data__deep__two="2",
        **{"environment__data__one.txt": "1", "environment__run.sh": "#!/bin/sh\necho ran $OLD\n"},
    )
    with contextlib.closing(open_task(tmp_path)) as env:
        output = call_shell(env, "pwd; cat in/made /data/deep/two /data/one.txt /tmp/other.txt; ls; /app/run.sh")[0]
        assert output == "/home/user\nhello world\n211in\nrenamed\nran form"


def test_the_verdict_is_the_verifiers_and_what_commands_leave_counts(tmp_path: Path) -> None:
    with contextlib.closing(open_task(write_task(tmp_path))) as env:
        call_shell(env, "echo 41 > answer.txt; mkdir kept && chmod 700 kept && ln -s ../answer.txt kept/link")
        call_shell(env, "echo 42 > kept/link")
        text, reward, terminated, _, info = finish(env)
        assert (text, reward, terminated, info["metrics"]["success"]) == ("The work is judged: reward 1.", 1.0, True, 1)
        env.reset(seed=1)
        assert finish(env)[1] == 0.0  # nothing of the episode before is there


def test_the_last_turn_and_the_last_second_are_judged(tmp_path: Path) -> None:
    write_task(tmp_path, task_toml=f"{CONFIG}[agent]\ntimeout_sec = 1\n")
    with contextlib.closing(open_task(tmp_path, max_turns=2)) as env:
        call_shell(env, "echo 42 > answer.txt")
        assert call_shell(env, "true")[1:3] == (1.0, True)
        env.reset(seed=0)
        text, reward, terminated, *_ = call_shell(env, "echo 42 > answer.txt; sleep 30")
        assert (reward, terminated) == (1.0, True) and "the 1 s of this task are used up" in text


def test_variables_and_working_folder_are_those_of_the_file(tmp_path: Path) -> None:
    tables = '[environment.env]\nA = "it\'s"\n[verifier.env]\nB = "2"\n[solution.env]\nC = "3"\n'
    test = f'[ "$A$B$C$PWD" = "it\'s2/app/deep" ] && echo 1 > {REWARD}\n'
    lines = "FROM debian\nWORKDIR /app/deep\n"
    solve = '[ "$A$B$C" = "it\'s3" ]\n'
    write_task(tmp_path, environment__Dockerfile=lines, tests__test_sh=test, solution__solve_sh=solve)
    (tmp_path / "task.toml").write_text(f"{CONFIG}{tables}")
    with contextlib.closing(open_task(tmp_path)) as env:
        assert play_policy(env, "oracle", 0) == 1.0


BAD_VERIFIERS = {
    "exit 0": "wrote no reward",
    "exit 3": r"wrote no reward \(exit code 3\)",
    "no-such-program": r"wrote no reward \(exit code 127\): .*no-such-program: ",
    "kill -9 $$": r"wrote no reward \(exit code 137\)",
    f"echo 1 > {REWARD}; sleep 60": "was stopped after 2 s",
    f"echo well done > {REWARD}": "reward.txt has no number: 'well done'",
    f"echo nan > {REWARD}": "has no number",
    f": > {REWARD}": "has no number: ''",
    f'echo "{{\\"a\\": 1, \\"b\\": 0}}" > {JSON_REWARD}': "one reward is played, and .*json has: a, b",
    f"echo [1] > {JSON_REWARD}": "one reward is played",
    f'echo "{{\\"a\\": \\"1\\"}}" > {JSON_REWARD}': "reward.json has no number: '1'",
    f"ln -s /etc/passwd {REWARD}": "wrote no reward",
}


@pytest.mark.parametrize("line", BAD_VERIFIERS)
def test_a_verifier_without_a_verdict_is_a_fault_and_never_a_zero(tmp_path: Path, line: str) -> None:
    write_task(tmp_path, tests__test_sh=f"{line}\n", task_toml=CONFIG.replace("= 20", "= 2"))
    with contextlib.closing(open_task(tmp_path)) as env:
        with pytest.raises(EnvironmentFault, match=BAD_VERIFIERS[line]):
            finish(env)
        env.reset(seed=0)  # the next episode is not harmed


def test_rewards_of_both_forms_are_read(tmp_path: Path) -> None:
    for line, reward in {
        f"echo 0.25 > {REWARD}; exit 255": 0.25,
        f"echo 0.5 > {REWARD}; kill -9 $$": 0.5,
        f"yes | head -c 2000000; echo 0.75 > {REWARD}": 0.75,
        f'echo "{{\\"score\\": 0.5}}" > {JSON_REWARD}; echo 0 > {REWARD}': 0.5,
    }.items():
        write_task(tmp_path, tests__test_sh=f"{line}\n")
        with contextlib.closing(open_task(tmp_path)) as env:
            assert finish(env)[1] == reward


@pytest.mark.parametrize("backend", BOXES)
def test_no_trick_of_an_agent_is_paid(tmp_path: Path, backend: str) -> None:
    logs, tests = '"${AGENTGYM_ROOT-}/logs"', '"${AGENTGYM_ROOT-}/tests"'
    tricks = (
        f"mkdir -p {logs}/verifier; echo 1 > {logs}/verifier/reward.txt; chmod 400 {logs}/verifier/reward.txt",
        f"mkdir -p {logs}/verifier/reward.json {logs}/verifier/reward.txt/deep",
        f"(setsid sh -c 'while :; do echo 1 > {REWARD}; done' >/dev/null 2>&1 &) ; sleep 0.1",
        f"echo 'echo 1 > {REWARD}' > {tests}/test.sh; chmod 555 {tests}",
        f"rm -rf {tests} {logs}; ln -s . {tests}; ln -s /dev {logs}",
        "cd ~; rm -rf app; ln -s . app",
        "mkdir -p ~/.local/lib/python3.11/site-packages; echo import os > ~/.local/lib/python3.11/site-packages/a.pth",
        "mkfifo pipe; mkdir shut; chmod 0 shut; touch -- '-x' 'a\nb'",
        "kill -9 -1; kill -9 $PPID",
    )
    with contextlib.closing(open_task(write_task(tmp_path), backend)) as env:
        for trick in tricks:
            env.reset(seed=0)
            reward, is_over = call_shell(env, trick)[1:3]
            if not is_over:
                with contextlib.suppress(EnvironmentFault):
                    reward = finish(env)[1]
            assert reward == 0.0, trick


@pytest.mark.parametrize("backend", BOXES)
def test_neither_solution_nor_tests_are_there_before_the_verdict(tmp_path: Path, backend: str) -> None:
    write_task(tmp_path, solution__solve_sh="# SECRET-1\n", tests__test_sh=f"# SECRET-2\necho 0 > {REWARD}\n")
    with contextlib.closing(open_task(tmp_path, backend)) as env:
        look = (
            'grep -rl "SECRET-[12]" ~ "${AGENTGYM_ROOT-}/tests" "${AGENTGYM_ROOT-}/solution" /app 2>/dev/null; echo end'
        )
        assert call_shell(env, look)[0] == "end"
        assert finish(env)[1] == 0.0


@pytest.mark.parametrize("backend", BOXES)
def test_work_that_is_too_large_to_judge_is_a_zero_and_nothing_is_left(tmp_path: Path, backend: str) -> None:
    env = open_task(write_task(tmp_path), backend)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    call_shell(env, "echo 42 > answer.txt; head -c 30000000 /dev/zero > large; (setsid sleep 300 >/dev/null 2>&1 &)")
    assert finish(env)[1:3] == (0.0, True)
    assert "the files of a box could not be taken out" in env.unwrapped.verifier_output  # type: ignore[attr-defined]
    env.close()
    deadline = time.monotonic() + 5
    while (left := {process.pid for process in psutil.Process().children(recursive=True)} - before) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not left


def test_tasks_are_held_out_by_their_content(tmp_path: Path) -> None:
    for number in range(12):
        write_task(tmp_path / f"t{number}", instruction_md=f"Write {number}.\n")
    env = make_env(f"harbor/{tmp_path}", {"backend": "namespaces"})
    drawn: dict[bool, set[str]] = {False: set(), True: set()}
    for seed in range(30):
        for is_held_out in (False, True):
            env.reset(seed=seed + 2**31 * is_held_out)
            drawn[is_held_out].add(env.unwrapped.task.name)  # type: ignore[attr-defined]
    env.close()
    assert drawn[False] and drawn[True] and not drawn[False] & drawn[True]


def test_a_task_without_a_solution_claims_none(tmp_path: Path) -> None:
    write_task(tmp_path, solution__solve_sh=None)
    (verdict,) = examine_env(f"harbor/{tmp_path}", {"backend": "namespaces"}, only=["oracle"])
    assert verdict.verdict == "not claimed"
    env = make_env(f"harbor/{tmp_path}")
    with pytest.raises(ConfigError, match="Harbor has no oracle policy"):
        policy_for(env, "oracle")


def test_env_check_finds_tests_that_pass_before_and_files_that_give_the_answer_away(tmp_path: Path) -> None:
    write_task(tmp_path / "a", tests__test_sh=f"echo 1 > {REWARD}\n")
    (verdict,) = examine_env(f"harbor/{tmp_path / 'a'}", {"max_turns": 1}, only=["canaries"])
    assert "the canary 'empty' scores 1.000" in verdict.findings[0].message
    solve = "echo the answer is 42 > answer.txt\n"
    write_task(tmp_path / "b", solution__solve_sh=solve, **{"environment__hint.txt": f"# psst\n{solve}"})
    (verdict,) = examine_env(f"harbor/{tmp_path / 'b'}", only=["answer leak"])
    assert "b: environment/hint.txt holds solution/solve.sh" in verdict.findings[0].message


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("backend", BOXES)
@pytest.mark.parametrize("task", TASK_FOLDERS, ids=lambda task: task.name)
def test_env_check_passes_a_kept_task(task: Path, backend: str) -> None:
    only = ["oracle", "cheat", "canaries", "answer leak", "reproducible", "close releases"]
    verdicts = examine_env(f"harbor/{task}", {"backend": backend, "max_turns": 2}, only=only)
    assert [(verdict.check, verdict.verdict) for verdict in verdicts] == [
        (name, "passed") for name in ("reproducible", "close releases", "oracle", "cheat", "canaries", "answer leak")
    ]


def test_kept_tasks_are_what_the_export_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(TASK_FOLDERS) == 8
    for task in TASK_FOLDERS:
        _, _, level, seed = task.name.split("-")
        folder = tmp_path / task.name
        words = ["env", "export", "Terminal-v0", str(folder), "--to", "harbor", "--tasks", "1", "--seed", seed]
        assert main([*words, "--env-kwargs", f"level={level}"]) == 0
        assert _texts(folder / task.name) == _texts(task)
    assert f"agentgym env check harbor/{folder}" in capsys.readouterr().out
    assert main(["env", "export", "TextGame-v0", str(tmp_path / "x"), "--to", "harbor"]) == 2
    assert "it has no method folder_task()" in capsys.readouterr().err and not (tmp_path / "x").exists()


def _texts(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_file_that_is_gone_is_a_fault_of_that_episode(tmp_path: Path) -> None:
    with contextlib.closing(open_task(write_task(tmp_path))) as env:
        os.remove(tmp_path / "tests" / "test.sh")
        os.symlink("/etc/passwd", tmp_path / "tests" / "test.sh")
        with pytest.raises(EnvironmentFault, match=r"could not be judged: .* is a link"):
            finish(env)


def test_what_a_person_types_is_a_command_until_it_is_done(tmp_path: Path) -> None:
    with contextlib.closing(open_task(write_task(tmp_path))) as env:
        assert env.step("echo 42 > answer.txt && cat answer.txt")[:3] == ("42", 0.0, False)
        assert env.step("done")[1:3] == (1.0, True)


def test_a_message_of_a_model_ends_the_work_like_a_typed_one(tmp_path: Path) -> None:
    env = open_task(write_task(tmp_path))
    assert isinstance(env.unwrapped, Harbor)
    assert env.step(Action.from_message(Message("assistant", "")))[2]
    env.close()
