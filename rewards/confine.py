"""What Linux offers to shut a process in, by system call where Python 3.11 has no function for it.

Everything here but the forks says whether it worked and never raises: what is missing on a machine is a missing layer
(sandbox.py).
"""

import contextlib
import ctypes
import functools
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig

NEWNS, NEWIPC, NEWUSER, NEWPID = 0x20000, 0x8000000, 0x10000000, 0x20000000  # of unshare(2)
FOLDER = "/dev/shm"   # where a program's own tmpfs lies: exists everywhere, and no Python is installed there
FOLDER_BYTES = 32 << 20
MAX_PROCESSES = 320   # of a program, threads included; Linux wants it over 300

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_MOUNT_SETATTR, _AT_FDCWD, _RECURSIVE = 442, -100, 0x8000
_WRITE, _READ, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_EXECUTE, _DEVICES = 1 << 0, 1 << 6 | 1 << 11

_libc = ctypes.PyDLL(None, use_errno=True) if sys.platform == "linux" else None  # PyDLL keeps the GIL, which a fork must hold


def unshare(flags: int) -> bool:
    return _libc is not None and _libc.unshare(flags) == 0


def fork() -> int:
    """fork(2), alone where there is one thread: a third of a millisecond less than os.fork, which also resets locks and the
    list of threads and runs what modules registered. inside.py seeds `random` itself."""
    if _libc is None or len(sys._current_frames()) > 1:  # a header may have started threads
        return os.fork()
    pid = _libc.fork()
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def fork_as_init() -> int:
    """Fork a child that is process 1 of a new pid namespace, or an ordinary child where that is not allowed."""
    home = os.open("/proc/self/ns/pid", os.O_RDONLY) if _libc is not None else -1
    try:
        unshare(NEWPID)
        return fork()
    finally:
        if home >= 0:  # unshare(2) holds for all later children: back to our own
            _libc.setns(home, NEWPID)
            os.close(home)


def private_mounts() -> bool:
    """A /proc that shows this pid namespace only, and an empty folder in memory, for this process and its children, where all
    else is read-only already."""
    if os.getpid() != 1 or not os.statvfs("/").f_flag & os.ST_RDONLY or not unshare(NEWNS | NEWIPC):
        return False
    options = f"size={FOLDER_BYTES},nr_inodes=1000,mode=0777".encode()
    nosuid_nodev_noexec, recursive_private = 2 | 4 | 8, 1 << 14 | 1 << 18
    return (_libc.mount(None, b"/", None, recursive_private, None) == 0
            and _libc.mount(b"proc", b"/proc", b"proc", nosuid_nodev_noexec, None) == 0
            and _libc.mount(b"tmpfs", FOLDER.encode(), b"tmpfs", nosuid_nodev_noexec, options) == 0)


def read_only() -> None:
    """For the template, whose mounts are its own: nothing in them can be changed from now on. Landlock does not stop the owner
    of a file from chmod, utime and setxattr, and /proc/self/exe leads to it past every later mount. Linux 5.12 or newer."""
    if os.getpid() == 1:
        change = struct.pack("=QQQQ", 1, 0, 0, 0)   # attributes to set, to clear, propagation, user namespace
        _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _RECURSIVE, change, ctypes.c_size_t(len(change)))


def limit_processes() -> bool:
    """At most MAX_PROCESSES in this pid namespace, threads included. Linux 6.14 or newer."""
    try:
        fd = os.open("/proc/sys/kernel/pid_max", os.O_WRONLY)
        os.write(fd, b"%d" % MAX_PROCESSES)
        os.close(fd)
        return True
    except OSError:
        return False


@functools.cache
def nproc_holds() -> bool:
    """Whether RLIMIT_NPROC stops a candidate: not where it is the machine's root, user namespace or not."""
    pid = os.fork()
    if pid == 0:
        unshare(NEWUSER)
        limit(resource.RLIMIT_NPROC, 1)
        try:
            if os.fork() == 0:
                os._exit(0)
        except OSError:
            os._exit(0)
        os.wait()  # or it stays with the template, as a zombie
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def die_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def no_new_privs() -> bool:
    return _libc is not None and _libc.prctl(38, 1, 0, 0, 0) == 0


def drop_capabilities() -> None:
    """Those that a new user namespace brings: they would hold for what the program creates in it."""
    if _libc is not None:
        _libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))


def limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with contextlib.suppress(OSError, ValueError):  # macOS refuses some
        resource.setrlimit(kind, (value, value))


def landlock(folder: str) -> bool:
    """From now on this process reads the Python library, shared libraries and `folder`, writes in `folder` alone, executes
    nothing, reaches no TCP port, and signals and abstract sockets of its own kind only (the last two as the kernel's version
    allows). Needs no_new_privs. See landlock(7)."""
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1) if _libc is not None else -1
    if version < 1:
        return False
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = struct.pack("=QQQ", handled, 3, 3)[:24 if version >= 6 else 16 if version >= 4 else 8]  # files, TCP, scopes
    ruleset = _libc.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0)
    for path, access in (*readable().items(), (folder, handled & ~_EXECUTE & ~_DEVICES)):
        fd = os.open(path, os.O_PATH)
        _libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", access, fd), 0)
        os.close(fd)
    done = _libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return done


@functools.cache
def readable() -> dict[str, int]:
    """What every program may read, with its rights."""
    folders = (os.path.join(sys.base_prefix, "lib"), sysconfig.get_path("stdlib"), *sys.path, "/lib", "/lib64", "/usr/lib",
               "/usr/lib64", "/usr/share/zoneinfo")
    files = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero")
    found: dict[str, int] = {}
    for path in map(os.path.realpath, folders):
        if os.path.isdir(path) and not any(path.startswith(f"{other}/") for other in found):
            found[path] = _READ | _READ_DIR
    found |= {path: _READ for path in files if os.path.exists(path)}
    return found | {"/dev/null": _READ | _WRITE}


def seccomp(may_fork: bool) -> bool:
    """From now on the calls in _DENIED fail with EPERM: memory that no rlimit counts, sockets (pairs excepted), parts of
    the kernel that no answer needs, limits and priorities of other processes; and new processes unless `may_fork`. Needs
    no_new_privs. See seccomp(2)."""
    program = seccomp_program(may_fork)
    return program is not None and _libc.prctl(22, 2, program[0], 0, 0) == 0


@functools.cache
def seccomp_program(may_fork: bool) -> tuple[bytes, ctypes.Array] | None:
    """The `sock_fprog` for seccomp, and the steps that it points to; None where there is none."""
    audit_arch, clone, prlimit, forks, numbers = _DENIED.get(platform.machine(), (0, 0, 0, (), ()))
    if _libc is None or not numbers or sys.maxsize < 1 << 32:
        return None
    load, equal, at_least, has, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, unknown, kill = 0x7FFF0000, 0x50001, 0x50026, 0x80000000  # EPERM, ENOSYS
    program = [(load, 0, 0, 4), (equal, 1, 0, audit_arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    for test, number in ((at_least, 0x40000000), *((equal, n) for n in numbers + (() if may_fork else forks))):
        program += [(test, 0, 1, number), (give, 0, 0, deny)]  # the first: x86-64's second set of numbers
    if not may_fork:  # clone3 hides its flags; without it libc uses clone, which may make threads
        program += [(equal, 0, 1, 435), (give, 0, 0, unknown)]
        program += [(equal, 0, 3, clone), (load, 0, 0, 16), (has, 1, 0, 0x10000), (give, 0, 0, deny)]
    # Linux lets a process set the limits of any other of its user, the checker's too: none but its own, named 0
    program += [(equal, 0, 3, prlimit), (load, 0, 0, 16), (equal, 1, 0, 0), (give, 0, 0, deny), (give, 0, 0, allow)]
    steps = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    return struct.pack("@HP", len(program), ctypes.addressof(steps)), steps


_DENIED = {  # audit number of the architecture, clone, prlimit64, fork and vfork; then socket, shmget, semget, msgget,
    # memfd_create, memfd_secret, unshare, setns, mount, ptrace, process_vm_readv and _writev, bpf, perf_event_open,
    # io_uring_setup, add_key, request_key, keyctl, userfaultfd, pidfd_getfd, setpriority, sched_setparam, sched_setscheduler,
    # sched_setaffinity, sched_setattr, ioprio_set
    "x86_64": (0xC000003E, 56, 302, (57, 58), (
        41, 29, 64, 68, 319, 447, 272, 308, 165, 101, 310, 311, 321, 298, 425, 248, 249, 250, 323, 438,
        141, 142, 144, 203, 314, 251)),
    "aarch64": (0xC00000B7, 220, 261, (), (
        198, 194, 190, 186, 279, 447, 97, 268, 40, 117, 270, 271, 280, 241, 425, 217, 218, 219, 282, 438,
        140, 118, 119, 122, 274, 30)),
}
