"""What `agentgym view` takes on a large run: seconds to its first page, indexing, searches, memory.

The run has `--episodes` episodes: those of the run RUN one after the other, again and again, each with a seed, a step
and a group of its own. Seconds are wall time; the rate is of the CPU time of the server, a process of its own.

    python benchmarks/viewer.py RUN [--episodes 100000]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from agentgym.rollout.record.frames import pack_lines
from agentgym.rollout.record.line_reader import LineReader, find_episodes

EPISODES_PER_STEP = 128
SEARCHES = ("key", "door", "cursed", '"the pearl"', '"go north"', "key door cursed", "nothing-of-the-kind")
TICKS = os.sysconf("SC_CLK_TCK")


def numbered_lines(run: Path, num_episodes: int) -> Iterator[bytes]:
    """Yields the episodes of the run as those of a longer one, with its evaluations before and after training."""
    path = find_episodes(run)
    assert path is not None, f"{run} holds no episodes"
    with LineReader(path) as lines:
        episodes = [json.loads(line) for block in lines.blocks_after(0, 0) for line in block.lines]
    played, held_out = ([each for each in episodes if (each["phase"] == "train") == is_train] for is_train in (1, 0))
    num_trained = num_episodes - 2 * len(held_out)
    phases = [("eval_before", held_out), ("train", islice(cycle(played), num_trained)), ("eval_after", held_out)]
    for number, (phase, episode) in enumerate((phase, episode) for phase, part in phases for episode in part):
        step = 0 if phase == "eval_before" else min(number, num_trained) // EPISODES_PER_STEP
        task = {**episode["task"], "seed": number}
        info = {name: value for name, value in episode["info"].items() if name != "task_digest"}
        changes = {"phase": phase, "step": step, "group": f"{step}/{number // 8}", "task": task, "info": info}
        yield json.dumps({**episode, **changes}, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


class Server:
    """`agentgym view` as a process; `ask` sends a request to it."""

    def __init__(self, run: Path, cache: Path) -> None:
        command = [sys.executable, "-m", "agentgym", "view", str(run), "--json"]
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            command, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        self._address = json.loads(self._process.stdout.readline())

    def age_s(self) -> float:
        """Returns the seconds since the command was started."""
        return time.monotonic() - self._started

    def ask(self, name: str, **body: object) -> Any:
        """Returns the answer to a request."""
        headers = {"Authorization": f"Bearer {self._address['token']}", "Content-Type": "application/json"}
        request = Request(f"{self._address['url']}/{name}", json.dumps(body).encode(), headers)
        with urlopen(request) as response:
            return json.load(response)

    def cost(self, name: str, body: Mapping[str, object], num_requests: int = 5) -> str:
        """Returns the least wall time of some requests and their mean CPU time, as text."""
        cpu_s, walls_s = self.cpu_s(), []
        for _ in range(num_requests):
            start_s = time.monotonic()
            self.ask(name, **body)
            walls_s.append(time.monotonic() - start_s)
        return f"{1000 * min(walls_s):.0f} ms, {1000 * (self.cpu_s() - cpu_s) / num_requests:.0f} CPU ms"

    def cpu_s(self) -> float:
        """Returns the CPU seconds of the process."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def peak_mb(self) -> float:
        """Returns the most memory that the process has had, in MB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) / 1000

    def end(self) -> None:
        """Ends the process."""
        self._process.terminate()
        self._process.wait()


def measure(run: Path, cache: Path, *, is_indexed: bool) -> None:
    """Prints what opening the run takes, and what is asked of it afterwards."""
    server = Server(run, cache)
    address_s = server.age_s()
    num_shown = server.ask("state")["runs"][0]["num_episodes"]
    server.ask("overview")
    print("opened again:" if is_indexed else "opened for the first time:")
    print(f"  address {address_s:.2f} s, first page {server.age_s():.2f} s, {server.cpu_s():.2f} CPU s")
    print(f"  {num_shown:,} episodes on it")
    if not is_indexed:
        started_cpu_s, slowest_s = server.cpu_s(), 0.0
        while (state := server.ask("state")["runs"][0])["num_indexed_bytes"] < state["num_bytes"]:
            start_s = time.monotonic()
            server.ask("overview")
            slowest_s = max(slowest_s, time.monotonic() - start_s)
            time.sleep(2)
        rate = (state["num_episodes"] - num_shown) / (server.cpu_s() - started_cpu_s)
        print(f"  indexing: {rate:,.0f} episodes a CPU second, in {server.age_s():.0f} s; the overview meanwhile")
        print(f"    took {1000 * slowest_s:.0f} ms at most; the index has {sum(_sizes(cache)) / 1e6:.0f} MB")
    else:
        for text in SEARCHES:
            body = {"filter": {"contains": text}, "sort": "reward", "offset": 0, "limit": 100}
            number = server.ask("episodes", **body)["number"]
            print(f"  search {text!r}: {server.cost('episodes', body)}, {number:,} episodes")
        for name, body in (("failures", {"filter": {}}), ("overview", {}), ("episode", {"line": 50})):
            print(f"  {name}: {server.cost(name, body)}")
    print(f"  peak memory {server.peak_mb():.0f} MB")
    server.end()


def _sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.rglob("*") if path.is_file()]


def main() -> None:
    """Writes the run and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--episodes", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run, cache = Path(name) / "run", Path(name) / "cache"
        run.mkdir()
        with open(run / "episodes.jsonl.zst", "wb") as file:
            lines = numbered_lines(options.run, options.episodes)
            while batch := list(islice(lines, 500)):
                file.writelines(pack_lines(batch))
        print(f"{options.episodes:,} episodes, {(run / 'episodes.jsonl.zst').stat().st_size / 1e6:.0f} MB")
        measure(run, cache, is_indexed=False)
        measure(run, cache, is_indexed=True)


if __name__ == "__main__":
    main()
