"""System calls by name: `name:number on x86_64:number on aarch64`, `-` where a machine has none.

Numbers are the kernel's interface (asm/unistd_64.h, asm-generic/unistd.h) and never change.
"""

__all__ = ["EXAMINED", "GROUPS", "MODES", "ORDINARY", "OWNERS", "REFUSED", "SIGNALS", "syscall_numbers"]

ORDINARY = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62 mmap:9:222 mprotect:10:226
munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 pread64:17:67 pwrite64:18:68
readv:19:65 writev:20:66 access:21:- pipe:22:- select:23:- sched_yield:24:124 mremap:25:216 msync:26:227
mincore:27:232 madvise:28:233 dup:32:23 dup2:33:- pause:34:- nanosleep:35:101 getitimer:36:102 alarm:37:-
setitimer:38:103 getpid:39:172 sendfile:40:71 sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212
shutdown:48:210 getsockname:51:204 getpeername:52:205 setsockopt:54:208 getsockopt:55:209 fork:57:- vfork:58:-
execve:59:221 exit:60:93 wait4:61:260 uname:63:160 fsync:74:82 fdatasync:75:83 ftruncate:77:46 getdents:78:-
getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- mkdir:83:- rmdir:84:- creat:85:- link:86:- unlink:87:- symlink:88:-
readlink:89:- umask:95:166 gettimeofday:96:169 getrlimit:97:163 getrusage:98:165 sysinfo:99:179 times:100:153
getuid:102:174 getgid:104:176 geteuid:107:175 getegid:108:177 setrlimit:160:164 getppid:110:173 getpgrp:111:-
getgroups:115:158 getresuid:118:148 getresgid:120:150 getpgid:121:155 getsid:124:156 capget:125:90
rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 mknod:133:- statfs:137:43
fstatfs:138:44 getpriority:140:141 sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125
sched_get_priority_min:147:126 prctl:157:167 arch_prctl:158:- gettid:186:178 readahead:187:213 getxattr:191:8
lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13 time:201:- futex:202:98
sched_getaffinity:204:123 epoll_create:213:- getdents64:217:61 set_tid_address:218:96 restart_syscall:219:128
fadvise64:221:223 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109
timer_delete:226:111 clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 exit_group:231:94
epoll_wait:232:- epoll_ctl:233:21 waitid:247:95
openat:257:56 mkdirat:258:34 mknodat:259:33 newfstatat:262:79 unlinkat:263:35 renameat:264:38 linkat:265:37
symlinkat:266:36 readlinkat:267:78 faccessat:269:48 pselect6:270:72 ppoll:271:73 set_robust_list:273:99
get_robust_list:274:100 epoll_pwait:281:22 signalfd:282:- timerfd_create:283:85 eventfd:284:- fallocate:285:47
timerfd_settime:286:86 timerfd_gettime:287:87 signalfd4:289:74 eventfd2:290:19 epoll_create1:291:20 dup3:292:24
pipe2:293:59 preadv:295:69 pwritev:296:70 recvmmsg:299:243 getcpu:309:168 renameat2:316:276
getrandom:318:278 execveat:322:281 membarrier:324:283 copy_file_range:326:285 preadv2:327:286 pwritev2:328:287
statx:332:291 rseq:334:293 pidfd_open:434:434 close_range:436:436 openat2:437:437 faccessat2:439:439
epoll_pwait2:441:441 futex_waitv:449:449 flock:73:32
"""
"""Calls that programs need, with any arguments."""

MODES = """
chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 utime:132:- utimes:235:- futimesat:261:- utimensat:280:88
"""
"""Modes and times of files: harmless if every file outside is on a read-only mount. Elsewhere they do nothing."""
OWNERS = """
chown:92:- fchown:93:55 lchown:94:- fchownat:260:54 setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 removexattr:197:14
lremovexattr:198:15 fremovexattr:199:16 truncate:76:45
"""
"""Owners and attributes of files, and truncation by name: harmless on such mounts too, refused elsewhere."""

GROUPS = """
setpgid:109:154 setsid:112:157
"""
"""Calls that leave the process group by which everything is killed."""

SIGNALS = """
kill:62:129 tkill:200:130 tgkill:234:131 rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 pidfd_send_signal:424:424
"""
"""Signals to other processes: harmless if those cannot be seen, or are out of reach."""

EXAMINED = """
clone:56:220 socketpair:53:199 prlimit64:302:261 ioctl:16:29 fcntl:72:25 clone3:435:435
"""
"""Calls whose arguments decide."""

REFUSED = """
ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 process_madvise:440:440 kcmp:312:272
pidfd_getfd:438:438 bpf:321:280 perf_event_open:298:241 keyctl:250:219 add_key:248:217 request_key:249:218
mount:165:40 umount2:166:39 mount_setattr:442:442 move_mount:429:429 open_tree:428:428 fsopen:430:430 fsmount:432:432
fsconfig:431:431 fspick:433:433 pivot_root:155:41 chroot:161:51 unshare:272:97 setns:308:268 io_uring_setup:425:425
io_uring_enter:426:426 io_uring_register:427:427 userfaultfd:323:282 socket:41:198 connect:42:203 bind:49:200
listen:50:201 accept:43:202 accept4:288:242 memfd_create:319:279 memfd_secret:447:447 open_by_handle_at:304:-
name_to_handle_at:303:- init_module:175:105 finit_module:313:273 delete_module:176:106 kexec_load:246:104
kexec_file_load:320:294 reboot:169:142 swapon:167:224 swapoff:168:225 acct:163:89 quotactl:179:60 syslog:103:116
settimeofday:164:170 clock_settime:227:112 adjtimex:159:171 clock_adjtime:305:266 sethostname:170:161
setdomainname:171:162 iopl:172:- ioperm:173:- modify_ldt:154:- personality:135:92 setuid:105:146 setgid:106:144
setreuid:113:145 setregid:114:143 setresuid:117:147 setresgid:119:149 setgroups:116:159 setfsuid:122:151
setfsgid:123:152 capset:126:91 setpriority:141:140 sched_setaffinity:203:122 sched_setscheduler:144:119
sched_setattr:314:274 sched_setparam:142:118 ioprio_set:251:30 shmget:29:194 shmat:30:196 shmctl:31:195 msgget:68:186
msgsnd:69:189 msgrcv:70:188 semget:64:190 semop:65:193 mq_open:240:180 vmsplice:278:75 splice:275:76 tee:276:77
mlock:149:228 mlockall:151:230 mlock2:325:284 seccomp:317:277 fanotify_init:300:262 lookup_dcookie:212:18
move_pages:279:239 migrate_pages:256:238 mbind:237:235 set_mempolicy:238:237 sendmmsg:307:269 vhangup:153:58
nfsservctl:180:42
"""
"""Calls that are refused (EPERM); calls in no table do not exist for programs (ENOSYS)."""


def syscall_numbers(table: str, machine: str) -> dict[str, int]:
    """Returns name to number on `machine` of the calls in a table; calls that the machine lacks are left out."""
    column = {"x86_64": 1, "aarch64": 2}[machine]
    rows = (entry.split(":") for entry in table.split())
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}
