"""A Docker daemon of one's own, in a network and mount namespace of its own; it ends with all it has started."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import psutil

__all__ = ["docker_daemon"]

START_S, END_S = 60.0, 60.0
ALONE = ("unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
BARE = ("--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=overlay2")


@contextlib.contextmanager
def docker_daemon() -> Iterator[str]:
    """The address of a daemon that only this block uses; afterwards no process, mount or file of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="agentgym-dockerd-"))
    folder.chmod(0o755)
    address = f"unix://{folder}/docker.sock"
    places = [f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"]
    log = (folder / "log").open("wb")
    process = subprocess.Popen([*ALONE, "dockerd", f"--host={address}", *BARE, *places], stdout=log, stderr=log)
    try:
        _await_answer(address, process, folder / "log")
        (folder / "docker.sock").chmod(0o666)  # an ordinary user may use this one
        yield address
    finally:
        _end(process)
        log.close()
        shutil.rmtree(folder)


def _await_answer(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address.removeprefix("unix://"))  # the SDK leaves a socket open that is refused
            with contextlib.closing(docker.DockerClient(base_url=address)) as client:
                client.ping()
            return
        time.sleep(0.1)
    raise RuntimeError(f"dockerd does not answer; its log ends with:\n{log.read_text()[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in psutil.wait_procs(started, timeout=10)[1]:
        child.kill()


if __name__ == "__main__":  # for trying things out: until SIGTERM or SIGINT
    with docker_daemon() as url:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
        print(f"export DOCKER_HOST={url}", flush=True)
        signal.sigwait([signal.SIGTERM, signal.SIGINT])
