"""Kernel namespaces. A program has a read-only system, one folder, its own processes and no network.

The server runs in a user, mount, network, IPC, UTS and PID namespace and has no other files than the box's. Each
execution has a PID and a mount namespace in it, and its program a user namespace in that. So the program's processes
are counted separately, and it has no rights over the server's mounts.
"""

import contextlib
import os
import resource
import signal
from collections.abc import Sequence

from agentgym.tools.sandbox.box import kernel
from agentgym.tools.sandbox.box.folders import make_folders
from agentgym.tools.sandbox.box.plan import Plan, limit_resources, readable_folders
from agentgym.tools.sandbox.box.processes import kill_until_gone, reap_children, stop_and_kill, visible_pids
from agentgym.tools.sandbox.box.seccomp import assemble, install_filter

__all__ = ["NamespaceBox", "enter_namespaces"]

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
DEVICES = ("null", "zero", "random", "urandom")
BUILT_ON = ("/mnt", "/srv", "/media", "/sys", "/opt")
HOME = "/box"
"""The folder where programs may write; /tmp is another name of it, unless that is a folder of its own."""
NOBODY = 65534  # the ID that Linux shows for users that a namespace does not map
INSIDE = 1000
"""The user and group ID of programs."""
SERVER_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)


def enter_namespaces() -> None:
    """Enters the server's namespaces; the next child is the first process of their PID namespace.

    As root, two users exist inside: `root`, who may read Python wherever it is installed, and `nobody`, who runs
    programs. Otherwise there is one user, our own.
    """
    if os.geteuid() == 0:
        os.setgroups([])
        ready, ready_writer = os.pipe()
        mapper = os.fork()
        if mapper == 0:
            os.read(ready, 1)
            os._exit(0 if _map_two_users(os.getppid()) else 1)
        try:
            kernel.unshare(SERVER_NAMESPACES)
        finally:
            os.write(ready_writer, b"x")
            mapped = os.waitpid(mapper, 0)[1] == 0
            os.close(ready)
            os.close(ready_writer)
        if mapped:
            return
        _map_self(0, 0)  # in another root's container there is one user
        return
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(SERVER_NAMESPACES)
    _map_self(0, 0, user, group)


def _map_two_users(pid: int) -> bool:
    try:
        for name in ("uid_map", "gid_map"):
            _write(f"/proc/{pid}/{name}", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
    except OSError:
        return False
    return True


def _map_self(user: int, group: int, outer_user: int = 0, outer_group: int = 0) -> None:
    with contextlib.suppress(OSError):  # it was denied before
        _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {outer_user} 1\n")
    _write("/proc/self/gid_map", f"{group} {outer_group} 1\n")


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


class NamespaceBox:
    """The operations that differ between boxes, in namespaces."""

    home = HOME

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._filter = assemble(os.uname().machine, owns_files=True, leaves_group=True, signals=True)

    def enclose_server(self) -> None:
        """Leaves the server only the box's own root."""
        folders = readable_folders(self._plan)
        root = next(path for path in BUILT_ON if os.path.isdir(path) and not any(f.startswith(path) for f in folders))
        kernel.mount("none", "/", "", MS_REC | MS_PRIVATE)
        kernel.mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
        for folder in folders:
            os.makedirs(root + folder, mode=0o755, exist_ok=True)
            kernel.mount(folder, root + folder, "", MS_BIND | MS_REC)
            kernel.protect_mounts(root + folder)
            if self._plan.hidden.startswith(f"{folder}/"):
                kernel.mount("none", root + self._plan.hidden, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0555,size=4k")
                kernel.protect_mounts(root + self._plan.hidden)
        _add_links(root)
        _add_devices(root, "/tmp" if "tmp" in self._plan.folders else HOME)
        _add_accounts(root)
        for folder in ("/proc", HOME):
            os.makedirs(root + folder)
        for name in self._plan.folders:
            if any(f"{folder}/".startswith(f"/{name}/") for folder in folders):
                raise OSError(f"/{name} holds Python or packages, and cannot be a folder of programs too")
            os.makedirs(f"{root}/{name}", exist_ok=True)
        if not os.path.exists(f"{root}/tmp"):  # Python itself, or packages, may be below it
            os.symlink(HOME, f"{root}/tmp")
        kernel.mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        os.mkdir(f"{root}/.old")
        os.chdir(root)
        kernel.pivot_root(".", ".old")
        os.chdir("/")
        kernel.unmount("/.old", MNT_DETACH)
        os.rmdir("/.old")
        kernel.protect_mounts("/", nodev=False)

    def open(self) -> None:
        """Called by the supervisor before it starts the box's first process."""
        kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)

    def begin(self) -> None:
        """Called by the box's first process, which is PID 1 of the box."""
        options = f"mode=1777,size={self._plan.scratch_bytes},nr_inodes=16384"
        kernel.mount("tmpfs", HOME, "tmpfs", MS_NOSUID | MS_NODEV, options)
        make_folders(HOME, self._plan.folders)
        for name in self._plan.folders:
            kernel.mount(f"{HOME}/{name}", f"/{name}", "", MS_BIND)
        kernel.mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=invisible,subset=pid")
        kernel.set_dumpable(False)
        os.chdir(HOME)

    def confine(self) -> None:
        """Called by the program's process before its first line is run."""
        plan = self._plan
        os.setsid()
        with contextlib.suppress(OSError):  # there is no such user inside if the server is not root's
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(kernel.CLONE_NEWUSER)
        kernel.set_dumpable(True)  # /proc/self belongs to it only then
        _map_self(INSIDE, INSIDE, user, group)
        kernel.drop_capabilities()
        kernel.limit(resource.RLIMIT_NPROC, plan.num_processes)  # counted in the user namespace, so after it is made
        limit_resources(plan)
        kernel.forbid_new_privileges()
        install_filter(self._filter)

    def set_program(self, pid: int) -> None:
        """Called by the first process and the supervisor; `pid` is the program's."""

    def pids(self, first: int, max_pids: int = 1 << 22) -> list[int]:
        """Returns the box's processes except its first one, up to `max_pids`."""
        return [pid for pid in visible_pids() if pid != 1][:max_pids]

    def signal_others(self, number: int) -> None:
        """Called by the first process: signals all others at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, number)

    def pause(self, first: int) -> None:
        """Called by the supervisor: makes the first process stop the others."""
        os.kill(first, signal.SIGUSR1)

    def end(self, first: int) -> None:
        """Called by the supervisor: ends the first process, and all others with it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)

    def kill_others(self, keep: int) -> bool:
        """Called by the first process: ends all but `keep`, so that none starts another; False if it cannot."""
        return stop_and_kill(self.signal_others, lambda: [pid for pid in visible_pids() if pid not in (1, keep)])

    def kill_all(self) -> None:
        """Called by the first process: ends all others."""
        self.signal_others(signal.SIGKILL)
        kill_until_gone(lambda: [pid for pid in visible_pids() if pid != 1])
        reap_children()

    def scratch_is_full(self, pids: Sequence[int]) -> bool:
        """Returns False: the size of the file system limits what can be written."""
        return False

    def held_bytes(self) -> int | None:
        """Returns None: no cgroup counts the memory of a box."""
        return None

    def num_ended_for_memory(self) -> int:
        """Returns 0: no cgroup ends processes for memory; the supervisor watches their memory."""
        return 0

    def close(self) -> None:
        """Called by the supervisor when the box's first process has ended, and all others with it."""


def _add_links(root: str) -> None:
    """Adds /bin and the like, if they are links into /usr."""
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            os.symlink(os.readlink(name), root + name)
    os.makedirs(f"{root}/etc", exist_ok=True)
    if os.path.exists("/etc/ld.so.cache"):
        _bind_file("/etc/ld.so.cache", f"{root}/etc/ld.so.cache")


def _add_devices(root: str, shared_memory: str) -> None:
    os.mkdir(f"{root}/dev")
    for name in DEVICES:
        _bind_file(f"/dev/{name}", f"{root}/dev/{name}", nodev=False)
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": shared_memory}
    for name, target in links.items():
        os.symlink(target, f"{root}/dev/{name}")


def _add_accounts(root: str) -> None:
    for name, line in (("passwd", f"user:x:{INSIDE}:{INSIDE}::{HOME}:/bin/sh\n"), ("group", f"user:x:{INSIDE}:\n")):
        with open(f"{root}/etc/{name}", "w", encoding="ascii") as file:
            file.write(line)


def _bind_file(source: str, target: str, *, nodev: bool = True) -> None:
    with open(target, "xb"):
        pass
    kernel.mount(source, target, "", MS_BIND)
    kernel.protect_mounts(target, nodev=nodev)
