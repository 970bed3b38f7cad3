"""The attack battery: what programs try, what stops each, and what is outside afterwards.

Every attack would do little harm without a box: bombs have bounds of their own, calls have arguments that do nothing.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from typing import Any

import pytest

from agentgym.tools.sandbox.box.syscalls import EXAMINED, OWNERS, REFUSED, syscall_numbers

pytestmark = pytest.mark.slow
CALLS = syscall_numbers(REFUSED + EXAMINED + OWNERS + " inotify_init1:294:26", platform.machine())
PRELUDE = """
import ctypes, errno, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    result = libc.syscall(ctypes.c_long(CALLS[name]), *arguments)
    print(errno.errorcode[ctypes.get_errno()] if result < 0 else 'DONE', flush=True)
def attempt(function, *arguments, **named):
    try:
        print('DONE', function(*arguments, **named), flush=True)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
"""
HONEST = "import collections; print(sum(x * x for x in range(1000)), sorted(collections.Counter('abca').items()))"
HONEST_OUTPUT = "332833500 [('a', 2), ('b', 1), ('c', 1)]\n"


@dataclass(frozen=True)
class Attack:
    """One program, and what contains it."""

    name: str
    mechanism: str
    code: str
    seen: str | dict[str, str] = ""
    """Pattern of the whole standard output, of every box or by kind."""
    ended: str | dict[str, str] = "exited"
    exit_code: int | None = 0
    language: str = "python"
    time_limit_s: float = 8.0
    collect: tuple[str, ...] = ()


def by(namespaces: str, landlock: str, docker: str | None = None, counted: str | None = None) -> dict[str, str]:
    """Returns what is seen in each box.

    A container has a root and processes of its own, as namespaces do. `counted` is for a landlock box whose tasks a
    cgroup counts, if that makes a difference.
    """
    return {
        "namespaces": namespaces,
        "landlock": landlock,
        "landlock counted": landlock if counted is None else counted,
        "docker": namespaces if docker is None else docker,
    }


def files(
    name: str, code: str, seen: str | dict[str, str], mechanism: str = "mounts | landlock rules", **more: Any
) -> Attack:
    return Attack(name, mechanism, code, seen, **more)


def refused(name: str, code: str, seen: str | dict[str, str] = "EPERM") -> Attack:
    return Attack(name, "seccomp", code, seen)


def stopped(name: str, mechanism: str, code: str, ended: str | dict[str, str], **more: Any) -> Attack:
    return Attack(name, mechanism, code, more.pop("seen", "(?s).*"), ended, more.pop("exit_code", -9), **more)


GONE = by("ENOENT", "EACCES")
HIDDEN = by("ENOENT", "EACCES", "EACCES")
NOT_DUMPABLE = "hidepid | not dumpable"
ATTACKS = [
    # ---- files
    files("reads a file of the machine", "attempt(open, SECRET)", GONE),
    files("writes a file of the machine", "attempt(open, SECRET, 'w')", GONE),
    files("makes a file outside", "attempt(open, OUTSIDE + '/new', 'w')", GONE),
    files("reads /etc/shadow", "attempt(open, '/etc/shadow')", GONE),
    files("reads the machine's memory", "attempt(open, '/dev/mem', 'rb')", by("ENOENT", "ENOENT|EACCES")),
    files("opens the terminal", "attempt(open, '/dev/tty')", by("ENOENT", "EACCES", "ENXIO")),
    files("changes the system", "attempt(open, '/usr/agentgym-attack', 'w')", by("EROFS|EACCES", "EACCES")),
    files("changes the root", "attempt(os.mkdir, '/agentgym-attack')", by("EROFS|EACCES", "EACCES")),
    files("lists home folders", "attempt(os.listdir, '/home')", GONE),
    files("follows a link out", "os.symlink(SECRET, 'link'); attempt(open, 'link')", GONE),
    files("goes out by ..", "attempt(open, '../' * 20 + SECRET)", GONE),
    files("hands a link out", "os.symlink(SECRET, 'out.txt'); os.symlink('/', 'all')", "", collect=("*",)),
    files("makes a hard link", "attempt(os.link, SECRET, 'link')", by("ENOENT", "EXDEV|EACCES")),
    files("moves a file out", "open('f', 'w'); attempt(os.rename, 'f', OUTSIDE + '/f')", by("ENOENT", "EXDEV|EACCES")),
    files("moves a file in", "attempt(os.rename, SECRET, 'f')", by("ENOENT", "EXDEV|EACCES")),
    files("removes a file", "attempt(os.unlink, SECRET)", GONE),
    files("cuts a file short", "attempt(os.truncate, SECRET, 0)", by("ENOENT", "EPERM")),
    files("changes a mode", "attempt(os.chmod, SECRET, 0)", by("ENOENT", "DONE None")),
    files("changes times", "attempt(os.utime, SECRET, (0, 0))", by("ENOENT", "DONE None")),
    files("takes a file over", "attempt(os.chown, SECRET, 1000, 1000)", by("ENOENT", "EPERM")),
    files("watches a file", "call('inotify_init1', 0)", "ENOSYS", "seccomp"),
    files("reads by /proc/self/root", "attempt(open, '/proc/self/root' + SECRET)", GONE),
    files(
        "reads the first process's environment",
        "attempt(open, '/proc/1/environ', 'rb')",
        HIDDEN,
        "hidepid | not dumpable",
    ),
    files(
        "reads its parent's memory",
        "attempt(open, f'/proc/{os.getppid()}/mem', 'rb')",
        HIDDEN,
        "hidepid | not dumpable",
    ),
    files(
        "reads another process's environment", "attempt(open, f'/proc/{SENTINEL}/environ', 'rb')", GONE, "pid namespace"
    ),
    files(
        "maps itself to root",
        "attempt(lambda: os.write(os.open('/proc/self/uid_map', os.O_WRONLY), b'0 0 1'))",
        by("EPERM", "EACCES"),
    ),
    files(
        "spares itself from the OOM killer",
        "attempt(lambda: os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000'))",
        "EACCES",
    ),
    files(
        "makes a device",
        "import stat; attempt(os.mknod, 'd', stat.S_IFBLK | 0o666, os.makedev(7, 0))",
        "EPERM",
        "no capability",
    ),
    files("reads files through a shell", "cat /etc/shadow $SECRET; echo $AGENTGYM_TEST_TOKEN", "", language="shell"),
    files(
        "looks for secrets in its environment",
        "print(sorted(os.environ))",
        r".*'HOME', .*'PATH'.*",
        "empty environment",
    ),
    files(
        "looks for open files",
        "import contextlib\nfor n in range(3, 4096):\n with contextlib.suppress(OSError): os.fstat(n); print(n)",
        "",
        "closed",
    ),
    # ---- rights
    refused("becomes root", "attempt(os.setuid, 0)"),
    refused("changes its root", "attempt(os.chroot, '/')"),
    refused("mounts", "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)"),
    refused("unmounts", "call('umount2', b'/proc', 2)"),
    refused("makes a user namespace", "call('unshare', 0x10000000)"),
    refused("clones into a namespace", "call('clone', 0x10000000 | 17, 0, 0, 0, 0)"),
    refused("clones by a structure", "call('clone3', 0, 0)", "ENOSYS"),
    refused("joins a namespace", "call('setns', 0, 0)"),
    refused("pivots the root", "call('pivot_root', b'.', b'.')"),
    refused("traces a process", "call('ptrace', 16, SENTINEL, 0, 0)"),
    refused("reads another's memory", "call('process_vm_readv', SENTINEL, 0, 0, 0, 0, 0)"),
    refused("copies another's file", "call('pidfd_getfd', 0, 0, 0)"),
    refused("sets up io_uring", "call('io_uring_setup', 1, ctypes.create_string_buffer(256))"),
    refused("handles page faults", "call('userfaultfd', 1)"),
    refused("loads a BPF program", "call('bpf', 0, 0, 0)"),
    refused("counts events", "call('perf_event_open', 0, 0, -1, -1, 0)"),
    refused("reads keys", "call('keyctl', 0, -3, 0)"),
    refused("loads a module", "call('finit_module', -1, b'', 0)"),
    refused("opens by handle", "call('open_by_handle_at', -100, 0, 0)"),
    refused("holds memory that no process has", "call('memfd_create', b'm', 0)"),
    refused("holds memory of System V", "call('shmget', 0, 4096, 0o1600)"),
    refused("reads the kernel's log", "call('syslog', 3, 0, 0)"),
    refused("names the machine", "call('sethostname', b'box', 3)"),
    refused("types into a terminal", "import fcntl; attempt(fcntl.ioctl, 0, 0x5412, b'x')"),
    refused("has the kernel signal others", "import fcntl; attempt(fcntl.fcntl, 1, fcntl.F_SETOWN, SENTINEL)"),
    refused(
        "limits another process",
        "import resource; attempt(resource.prlimit, SENTINEL, resource.RLIMIT_NOFILE, (9, 9))",
        "(?s)(EPERM)?.*",
    ),
    refused("moves another process to a core", "attempt(os.sched_setaffinity, SENTINEL, {0})"),
    Attack(
        "speaks to the kernel as x32",
        "seccomp",
        "libc.syscall(ctypes.c_long(0x40000000 | 39))\nprint('on')",
        "",
        exit_code=-31,
    )
    if platform.machine() == "x86_64"
    else refused("speaks to the kernel as x32", "print('EPERM')"),
    Attack(
        "raises its limits",
        "hard limits",
        "import resource\ntry: resource.setrlimit(resource.RLIMIT_NPROC, (999, 999)) if "
        "resource.getrlimit(resource.RLIMIT_NPROC)[1] < 999 else print('refused')\nexcept ValueError: print('refused')",
        "refused",
    ),
    # ---- the network
    refused("connects to a server", "attempt(socket.create_connection, ('127.0.0.1', PORT))", "EACCES"),
    refused("opens a socket", "attempt(socket.socket)", "EACCES"),
    refused("opens an abstract socket", "attempt(lambda: socket.socket(socket.AF_UNIX).connect(ABSTRACT))", "EACCES"),
    refused(
        "opens a socket of files",
        "attempt(lambda: socket.socket(socket.AF_UNIX).connect(OUTSIDE + '/stream'))",
        "EACCES",
    ),
    refused("opens vsock", "attempt(socket.socket, 40, socket.SOCK_STREAM)", "EACCES"),
    refused("opens netlink", "attempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW)", "EACCES"),
    refused("opens packets", "attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)", "EACCES"),
    refused(
        "makes datagrams of a pair",
        "attempt(lambda: socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', OUTSIDE + '/dgram'))",
    ),
    refused("names a socket of a pair", "attempt(lambda: socket.socketpair()[0].bind(ABSTRACT + '2'))"),
    # ---- processes
    Attack(
        "kills a process of the machine",
        "pid namespace | landlock scope",
        "attempt(os.kill, SENTINEL, 9)",
        by("ESRCH", "EPERM"),
    ),
    Attack(
        "kills its parent",
        "PID 1 | landlock scope",
        "attempt(os.kill, os.getppid(), 9); print('on')",
        by("(DONE None|EPERM)\non", "EPERM\non", "(?s).*"),
        by("exited", "exited", "killed"),
        None,
    ),
    Attack(
        "forks without end",
        "RLIMIT_NPROC | watched processes",
        "n = 0\nwhile n < 150:\n  try: pid = os.fork()\n"
        "  except OSError as e: print(e.errno == errno.EAGAIN, n < 30); break\n"
        "  if not pid: time.sleep(30); os._exit(0)\n  n += 1\nelse: time.sleep(5)",
        by("True True", "", counted="True True"),
        by("exited", "process_limit", counted="exited"),
        None,
    ),
    Attack(
        "forks in every child",
        "RLIMIT_NPROC | watched processes",
        "for _ in range(7):\n  try: os.fork()\n  except OSError: pass\ntime.sleep(3)",
        "",
        by("exited", "process_limit", counted="exited"),
        None,
    ),
    Attack(
        "starts threads without end",
        "RLIMIT_NPROC | RLIMIT_AS",
        "import threading\nthreading.stack_size(1 << 25)\nn = 0\ntry:\n"
        "  while n < 100: threading.Thread(target=time.sleep, args=(20,), daemon=True).start(); n += 1\n"
        "except RuntimeError: print(n < 30)\nos._exit(0)",
        "True",
    ),
    Attack(
        "leaves a daemon",
        "the end of PID 1 | killed group",
        "if not os.fork():\n  try: os.setsid()\n  except OSError: pass\n  if not os.fork():\n"
        "    time.sleep(60)\n  os._exit(0)\nprint('left')",
        "left",
    ),
    Attack(
        "leaves its group",
        "the end of PID 1 | seccomp",
        "attempt(os.setsid if os.getpid() != 2 else lambda: os.setpgid(0, 0))",
        by("EPERM|DONE.*", "EPERM"),
    ),
    stopped("never ends", "clock", "while True: pass", "time_limit", time_limit_s=0.5),
    stopped("sleeps", "clock", "time.sleep(3600)", "time_limit", time_limit_s=0.5),
    stopped(
        "ignores every signal",
        "SIGKILL to PID 1 | group",
        "for n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
        "  except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
        "time_limit",
        time_limit_s=0.5,
    ),
    stopped("stops itself", "clock", "os.kill(os.getpid(), signal.SIGSTOP)", "time_limit", time_limit_s=0.5),
    stopped("computes a huge number", "clock", "9 ** 9 ** 9", "time_limit", time_limit_s=0.5),
    stopped(
        "backtracks in a pattern",
        "clock",
        "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')",
        "time_limit",
        time_limit_s=0.5,
    ),
    stopped(
        "loops in children",
        "SIGKILL to PID 1 | group",
        "[os.fork() for _ in range(2)]\nwhile True: pass",
        "time_limit",
        time_limit_s=0.5,
    ),
    stopped("loops in a shell", "clock", "while :; do :; done", "time_limit", time_limit_s=0.5, language="shell"),
    stopped(
        "closes its output and stays", "clock", "os.closerange(0, 99)\ntime.sleep(60)", "time_limit", time_limit_s=0.5
    ),
    # ---- memory, disk, output
    Attack("takes memory at once", "RLIMIT_AS", "bytearray(1 << 30)", "", exit_code=1),
    Attack(
        "takes memory bit by bit",
        "RLIMIT_AS",
        "kept = []\nwhile len(kept) < 64: kept.append(bytes(1 << 24))",
        "",
        exit_code=1,
    ),
    stopped(
        "takes memory in children",
        "watched memory",
        "for _ in range(6):\n  if not os.fork():\n"
        "    kept = bytearray(b'x') * (80 << 20); time.sleep(20); os._exit(0)\ntime.sleep(20)",
        "memory",
    ),
    stopped(
        "shares memory",
        "watched memory",
        "import mmap\nfor _ in range(4):\n  if not os.fork():\n    m = mmap.mmap(-1, 100 << 20)\n"
        "    for at in range(0, len(m), 4096): m[at] = 1\n    time.sleep(20)\ntime.sleep(20)",
        "memory",
    ),
    Attack(
        "unpacks a bomb",
        "RLIMIT_AS",
        "import gzip\ngzip.decompress(gzip.compress(bytes(1 << 25), 1) * 16)",
        "",
        exit_code=1,
    ),
    Attack(
        "writes a huge file",
        "RLIMIT_FSIZE",
        "f = open('f', 'wb', 0)\ndef fill():\n  for _ in range(40): f.write(bytes(1 << 20))\nattempt(fill)",
        "EFBIG|ENOSPC",
    ),
    Attack(
        "fills the disk",
        "size of tmpfs | watched folder",
        "def fill():\n  for n in range(40): open(f'f{n}', 'wb').write(bytes(1 << 20))\n  time.sleep(5)\nattempt(fill)",
        by("ENOSPC", ""),
        by("exited", "disk_limit"),
        None,
    ),
    Attack(
        "fills /dev/shm",
        "mounts | landlock rules",
        "def fill():\n  with open('/dev/shm/agentgym-attack', 'wb', 0) as f:\n"
        "    for _ in range(20): f.write(bytes(1 << 20))\nattempt(fill)",
        by("ENOSPC|EFBIG", "EACCES", "ENOENT"),
    ),
    stopped("prints without end", "capped pipe", "while True: print('x' * 1000)", "output_limit"),
    stopped("complains without end", "capped pipe", "while True: sys.stderr.write('x' * 1000)", "output_limit"),
    Attack(
        "opens files without end",
        "RLIMIT_NOFILE",
        "kept = []\ndef more():\n  while len(kept) < 500: kept.append(open('/dev/null'))\nattempt(more)",
        "EMFILE",
    ),
    Attack("asks for input", "/dev/null", "try: input()\nexcept EOFError: print('none')", "none"),
    Attack("crashes", "its own process", "ctypes.string_at(0)", "", exit_code=-11),
    Attack(
        "recurses without end",
        "its own process",
        "sys.setrecursionlimit(20_000)\ndef f(): f()\nf()",
        "",
        exit_code=None,
    ),
]


def expected(value: str | dict[str, str], opened: Any) -> str:
    if isinstance(value, str):
        return value
    return value["landlock counted" if opened.is_counted else opened.backend]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_stays_in_its_box_and_harms_no_job_beside_it(attack: Attack, opened: Any, outside: Any) -> None:
    code = attack.code
    names = {**outside.names, "CALLS": CALLS}
    if attack.language == "shell":
        code = f"SECRET={outside.names['SECRET']}\n{code}"
    else:
        code = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + PRELUDE + code
    call = {"language": attack.language, "time_limit_s": attack.time_limit_s, "collect": list(attack.collect)}
    result, honest = opened.run_all([{**call, "code": code}, {"code": HONEST}])
    assert expected(attack.ended, opened) == result.ended.value, result
    assert re.fullmatch(expected(attack.seen, opened), result.stdout.removesuffix("\n")), result
    assert attack.exit_code is None or result.exit_code == attack.exit_code, result
    assert "secret" not in result.stdout.replace("secret.txt", "") + result.stderr.replace("secret.txt", "")
    assert not result.files
    assert (honest.stdout, honest.exit_code) == (HONEST_OUTPUT, 0), honest
    opened.assert_at_rest()
    outside.assert_untouched()


def test_the_number_of_attacks_is_the_documented_one() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 80
