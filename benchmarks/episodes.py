"""Thousands of episodes with python and shell tools, a tenth of them hostile: what do they leave behind?

Scripted policies play through the real rollout. An honest episode computes, writes a file, reads it again and hands in
what it found; a hostile one first attacks, and then does the same. Printed after each quarter: memory of this process
and of the sandbox's server, processes, open files, ports, threads, temporary files; then the honest episodes that were
disturbed, and every process on the machine that has an attack's mark.

    python benchmarks/episodes.py [--episodes 2000] [--concurrency 64] [--backend namespaces] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.embedded import embedded_folder
from agentgym.envs import TextEnv, ToolEnv
from agentgym.envs.base.cheater import tool_call_reply
from agentgym.envs.base.policies import game_of
from agentgym.evaluation.play.policies import PlayedEnv, PolicyLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.sampling.sampler import Sampler, SamplerConfig
from agentgym.tools.calling.definition import tool
from agentgym.tools.code import CodeTools
from agentgym.tools.sandbox import BACKENDS, SandboxLimits
from agentgym.trajectory import Status, Trajectory
from agentgym.types import Message, Task

PARTS = 4
HOSTILE_SHARE = 10
"""One episode in so many is hostile."""
LIMITS = SandboxLimits(time_limit_s=3.0, memory_mb=96, num_processes=16, scratch_mb=4, output_kb=64)
MARK = f"agentgym-attack-{secrets.token_hex(6)}"
"""The mark in the command line of what an attack starts, or in the name of what it writes."""
DAEMON = (
    f"import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    f"        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(9999)', '{MARK}'])\n"
    "    os._exit(0)\ntime.sleep(0.05)"
)
ATTACKS = {
    "fork bomb": ("python", "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"),
    "memory bomb": ("python", "held = []\nwhile True:\n    held.append(bytearray(1 << 22))"),
    "endless loop": ("python", "while True: pass"),
    "daemon": ("python", DAEMON),
    "shell daemon": ("shell", f"(setsid sh -c 'sleep 9999; : {MARK}' >/dev/null 2>&1 &) ; trap '' TERM HUP; echo on"),
    "huge output": ("shell", "yes"),
    "full disk": ("python", "while True:\n    open(str(id(object())), 'ab').write(bytes(1 << 20))"),
    "writes outside": (
        "shell",
        f"for d in /tmp /var/tmp /dev/shm /root /home /usr /etc / ~; do echo x > $d/{MARK}; done",
    ),
    "a port": ("python", "import socket\nsocket.create_server(('127.0.0.1', 0))"),
    "its parents": ("python", "import os, signal\nfor pid in (1, os.getppid(), -1): os.kill(pid, signal.SIGKILL)"),
}


class Desk(ToolEnv):
    """Multiply two numbers with the tools and hand in the product."""

    max_turns = 8

    def __init__(self, backend: str) -> None:
        super().__init__(tool_sources=[partial(CodeTools, limits=LIMITS, backend=backend)])

    def start(self, options: dict[str, Any]) -> str:
        """Draws the numbers."""
        self.numbers = [int(number) for number in self.np_random.integers(100, 1000, 2)]
        self.attack = str(options.get("attack", ""))
        return f"Numbers: {self.numbers}"

    @tool
    def hand_in(self, product: str) -> str:
        """Hands in the product, as it was read."""
        right = product.split() == [str(self.numbers[0] * self.numbers[1])] * 2
        self.end(success=right, reward=float(right))
        return "Done."

    def make_oracle(self) -> Script:
        """The script of the benchmark."""
        return Script()


class Script:
    """A policy that attacks if the task asks for it, then does honest work."""

    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        """Writes the script."""
        game = game_of(env, Desk)
        first, second = game.numbers
        self._calls = [
            ("python", f"product = {first} * {second}"),
            ("shell", f"echo $(({first} * {second})) > product.txt"),
            ("python", "print(product, open('product.txt').read())"),
        ]
        if game.attack:
            self._calls.insert(0, ATTACKS[game.attack])

    def act(self, observation: str) -> Message:
        """Returns the next call; at last hands in what the call before showed."""
        if not self._calls:
            return tool_call_reply("hand_in", product=observation)
        name, code = self._calls.pop(0)
        return tool_call_reply(name, **{"code" if name == "python" else "command": code})


@dataclass(frozen=True, kw_only=True)
class Left:
    """The resources in use after a number of episodes."""

    episodes: int
    rss_mb: float
    server_mb: float
    processes: int
    files: int
    server_files: int
    ports: int
    threads: int
    temporary: int
    seconds: float


def left_after(episodes: int, seconds: float) -> Left:
    """Measures this process and its children."""
    gc.collect()
    me = psutil.Process()
    children = _wait_for_children(me)
    return Left(
        episodes=episodes,
        rss_mb=round(me.memory_info().rss / (1 << 20), 1),
        server_mb=round(sum(child.memory_info().rss for child in children) / (1 << 20), 1),
        processes=len(children),
        files=me.num_fds(),
        server_files=sum(child.num_fds() for child in children),
        ports=sum(len(process.net_connections()) for process in (me, *children)),
        threads=me.num_threads(),
        temporary=sum(1 for path in Path(tempfile.gettempdir()).rglob("*") if not path.is_dir()),
        seconds=round(seconds, 1),
    )


def _wait_for_children(process: psutil.Process) -> list[psutil.Process]:
    """Returns the descendants of a process once they are stable for a while: a closed box ends a moment later."""
    children, since, started = process.children(recursive=True), time.monotonic(), time.monotonic()
    while time.monotonic() - since < 1.0 and time.monotonic() - started < 30.0:
        time.sleep(0.05)
        if (now := process.children(recursive=True)) != children:
            children, since = now, time.monotonic()
    return children


def find_marks() -> list[str]:
    """Returns the processes of the machine, and the files in reach, that have the attacks' mark."""
    lines = [
        " ".join(process.info["cmdline"] or ())
        for process in psutil.process_iter(["cmdline"])
        if process.pid != os.getpid()
    ]
    folders = ("/tmp", "/var/tmp", "/dev/shm", str(Path.home()), "/home", "/usr", "/etc", "/", tempfile.gettempdir())
    return [line for line in lines if MARK in line] + [folder for folder in folders if (Path(folder) / MARK).exists()]


def tasks(first: int, number: int) -> list[Task]:
    """Returns tasks, every tenth with an attack, of one kind after the other."""
    names = list(ATTACKS)
    drawn_tasks = []
    for seed in range(first, first + number):
        attack = names[seed // HOSTILE_SHARE % len(names)] if seed % HOSTILE_SHARE == 0 else ""
        drawn_tasks.append(Task("Desk-v0", seed, options={"attack": attack} if attack else {}))
    return drawn_tasks


async def play_episodes(sampler: Sampler, first: int, number: int) -> list[tuple[str, Trajectory]]:
    """Plays episodes; returns the attack ("" for none) and the trajectory of each."""
    ordered = tasks(first, number)
    groups = await sampler.sample(ordered, 1, run_seed=first)
    return [
        (str(task.options.get("attack", "")), group.trajectories[0])
        for task, group in zip(ordered, groups, strict=True)
    ]


def main() -> int:
    """Prints the table, and with --json one JSON object as the last line; returns 1 if any is left or disturbed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentgym-episodes-") as folder:
        tempfile.tempdir = folder  # temporary files are made here, and counted
        rows, outcomes = measure(options.episodes, options.concurrency, options.backend)
    for name, count in sorted(outcomes.items()):
        print(f"{name}: {count}")
    disturbed = sum(count for name, count in outcomes.items() if name.startswith("honest") and name != "honest: solved")
    remains = find_marks()
    print(f"honest episodes disturbed: {disturbed}; marked processes and files left: {remains or 'none'}")
    if options.json:
        report = {
            "rows": [asdict(row) for row in rows],
            "outcomes": outcomes,
            "disturbed": disturbed,
            "marked": remains,
        }
        print(json.dumps(report))
    return 1 if disturbed or remains else 0


def measure(episodes: int, concurrency: int, backend: str) -> tuple[list[Left], Counter[str]]:
    """Returns what was left after each quarter, and the number of episodes by kind and end."""
    loop = PolicyLoop(renderer_for(ChatTokenizer.load(embedded_folder())), Limits(max_turns=8))
    sampler = Sampler(loop, lambda task: PlayedEnv(Desk(backend), "oracle"), SamplerConfig(concurrency=concurrency))
    outcomes: Counter[str] = Counter()
    rows, part = [], episodes // PARTS
    print(" ".join(f"{name:>12}" for name in Left.__dataclass_fields__))
    with asyncio.Runner() as runner:
        for number in range(PARTS):
            started = time.monotonic()
            for attack, trajectory in runner.run(play_episodes(sampler, number * part, part)):
                solved = trajectory.status is Status.COMPLETED and trajectory.metrics.get("success") == 1.0
                outcomes[f"{attack or 'honest'}: {'solved' if solved else trajectory.status.value}"] += 1
            rows.append(left_after((number + 1) * part, time.monotonic() - started))
            print(" ".join(f"{value:>12}" for value in asdict(rows[-1]).values()), flush=True)
    sampler.close()
    return rows, outcomes


if __name__ == "__main__":
    sys.exit(main())
