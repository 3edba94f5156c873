"""Programs that try to get out or to bring the machine down, for test_attacks.py: resources, texts, escapes."""

HOST_FILE = "@HOST_FILE@"  # stands for a file outside, whose text is "escaped"

RESOURCES = {
    "a list too long": "def f(x): return len([0] * 10**11)",
    "a list that grows": """
        def f(x):
            a = []
            while True: a.append(" " * 10**6 + str(len(a)))
        """,
    "memory by mmap": """
        import mmap
        def f(x):
            kept = []
            while True:
                kept.append(mmap.mmap(-1, 1 << 26))
                kept[-1].write(b"x" * (1 << 26))
        """,
    "children that hold memory": """
        def f(x):
            for _ in range(16):
                if os.fork() == 0:
                    a = bytearray(40 << 20)
                    for i in range(0, len(a), 4096): a[i] = 1
                    time.sleep(60)
            time.sleep(60)
        """,
    "fork bomb": """
        def f(x):
            while True:
                try: os.fork()
                except OSError: pass
        """,
    "fork bomb that changes sessions": """
        def f(x):
            while True:
                try:
                    if os.fork() == 0: os.setsid()
                except OSError: pass
        """,
    "thread bomb": """
        threading.stack_size(32768)
        def f(x):
            while True:
                try: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                except RuntimeError: pass
        """,
    "a child that computes while the parent sleeps": """
        def f(x):
            for _ in range(4):
                if os.fork() == 0:
                    while True: pass
            time.sleep(60)
        """,
    "children that compete with it for the cores": """
        def f(x):
            for _ in range(40):
                if os.fork() == 0:
                    while True: pass
            while True: pass
        """,
    "a grandchild that lives on": """
        def f(x):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
                    ctypes.CDLL(None).prctl(1, 0)
                    time.sleep(1000)
                os._exit(0)
            os.wait()
            return 0
        """,
    "fills the folder": """
        def f(x):
            for n in range(10**6):
                with open(str(n), "wb") as file:
                    for _ in range(16): file.write(b"x" * 10**6)
        """,
    "a million files": """
        def f(x):
            for n in range(10**7): os.mkdir(str(n))
        """,
    "memory in memfd": """
        def f(x):
            while True:
                fd = os.memfd_create("m")
                for _ in range(15): os.write(fd, b"x" * (1 << 20))
        """,
    "memory in shared segments": """
        def f(x):
            libc = ctypes.CDLL(None)
            libc.shmat.restype = ctypes.c_void_p
            while True:
                segment = libc.shmget(0, 1 << 26, 0o1600)
                if segment < 0: raise MemoryError
                address = libc.shmat(segment, None, 0)
                ctypes.memset(address, 1, 1 << 26)
                libc.shmdt(ctypes.c_void_p(address))
        """,
    "children that share memory": """
        import mmap
        def f(x):
            for _ in range(16):
                if os.fork() == 0:
                    mmap.mmap(-1, 40 << 20).write(b"x" * (40 << 20))
                    time.sleep(60)
            time.sleep(60)
        """,
    "a flood of output": """
        def f(x):
            while True:
                print("x" * 10**6)
                os.write(2, b"x" * 10**6)
        """,
    "a result too large": "def f(x): return 'x' * (200 << 20)",
    "a small result that is large": """
        def f(x):
            a = []
            for _ in range(40): a = [a, a]
            return a
        """,
    "a result that nests": """
        def f(x):
            a = []
            for _ in range(10**6): a = [a]
            return a
        """,
    "a result without end": """
        import itertools
        def f(x): return itertools.count()
        """,
    "a result that contains itself": """
        def f(x):
            a = [7]
            a.append(a)
            return a
        """,
    "a ring of nodes": """
        def f(x):
            node = ListNode()
            node.val, node.next = 1, node
            return node
        """,
    "hash collisions": """
        def f(x): return {n * (2**61 - 1) for n in range(1, 20_000)}
        """,
    "an int of ten million digits": "def f(x): return 1 << 30_000_000",
    "recursion": "def f(x): return f(x + 1) + 1",
    "recursion without limit": """
        sys.setrecursionlimit(10**9)
        def f(x): return [f(x + 1)]
        """,
    "endless": "def f(x):\n    while True: pass",
    "endless while it is defined": "while True: pass",
    "endless in C": "def f(x): return sum(x for x in iter(int, 1))",
    "one long operation": "def f(x): return str(7 ** (10**9))",
    "a regular expression": """
        import re
        def f(x): return re.match(r"(a+)+$", "a" * 40 + "b")
        """,
    "sleeps": "def f(x): time.sleep(60)",
    "sleeps while it is defined": "time.sleep(60)",
    "stops itself": "def f(x): os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)",
    "ignores every signal": """
        for n in range(1, 64):
            try: signal.signal(n, signal.SIG_IGN)
            except (OSError, ValueError): pass
        def f(x):
            while True: pass
        """,
    "raises its limits": """
        import resource
        def f(x):
            for kind in range(16):
                try: resource.setrlimit(kind, (-1, -1))
                except (OSError, ValueError): pass
            return bytearray(1 << 40)
        """,
    "waits for a lock": """
        def f(x):
            lock = threading.Lock()
            lock.acquire(); lock.acquire()
        """,
    "reads its own pipe": """
        def f(x):
            for fd in range(3, 16):
                try: os.read(fd, 1)
                except OSError: pass
        """,
    "a reply that is never read": """
        def f(x):
            for fd in range(3, 16):
                try:
                    while True: os.write(fd, b"\\0" * 8 + b"x" * 10**6)
                except OSError: pass
        """,
}

TEXTS = {
    "parentheses": "x = " + "(" * 60_000,
    "brackets that close": "x = " + "[" * 30_000 + "]" * 30_000,
    "signs": "x = " + "-" * 60_000 + "1",
    "sums": "x = " + "1+" * 30_000 + "1",
    "attributes": "x = a" + ".b" * 30_000,
    "calls": "x = a" + "()" * 30_000,
    "lambdas": "f = " + "lambda x:" * 6_000 + "0",
    "indentation": "".join(" " * n + "if 1:\n" for n in range(300)) + " " * 300 + "pass",
    "else if": "if 0: pass\n" + "elif 0: pass\n" * 4_000,
    "constants to fold": "x = (((((9**9)**99)**99)**99)**99)\ny = 'x' * 9**9 * 9**9\nf = lambda x: 0",
    "a long number": "x = " + "9" * 60_000,
    "comprehensions": "x = " + "[" * 150 + "0" + "for _ in x]" * 150,
    "a zero byte": "f = lambda x: 0\0",
    "half a character": "f = lambda x: '\ud800'",
    "a coding cookie": "# -*- coding: rot13 -*-\nqrs s(k): erghea 48271",
    "strings in strings": "x = f'" + "{f\"{" * 2_000 + "'",
    "decorators": "@f\n" * 20_000 + "def f(x): pass",
    "patterns": "match 1:\n    case " + "[" * 20_000,
    "names": "global " + ",".join(f"a{n}" for n in range(9_000)),
    "blocks": "try: pass\nfinally:\n" + "".join(" " * n + "try: pass\n" + " " * n + "finally:\n" for n in range(1, 99)),
}

ESCAPES = {
    "reads a file": f"def f(x): return open({HOST_FILE!r}).read()",
    "reads a file through /proc": f"def f(x): return open('/proc/self/root' + {HOST_FILE!r}).read()",
    "reads a file through a link": f"""
        def f(x):
            os.symlink({HOST_FILE!r}, "link")
            return open("link").read()
        """,
    "reads a file through a hard link": f"""
        def f(x):
            os.link({HOST_FILE!r}, "link")
            return open("link").read()
        """,
    "writes a file": f"""
        def f(x):
            open({HOST_FILE!r}, "w").write("gone")
            return "escaped"
        """,
    "removes a file": f"def f(x): os.remove({HOST_FILE!r}); return 'escaped'",
    "changes a file's mode": f"def f(x): os.chmod({HOST_FILE!r}, 0o600); return 'escaped'",
    "leaves a note in a file's times": f"def f(x): os.utime({HOST_FILE!r}, (1, 1)); return 'escaped'",
    "leaves a note in a file's attributes": f"def f(x): os.setxattr({HOST_FILE!r}, 'user.note', b'1'); return 'escaped'",
    "changes the interpreter's mode": """
        def f(x):
            os.chmod("/proc/self/exe", os.stat("/proc/self/exe").st_mode)
            return "escaped"
        """,
    "slows the checker down": """
        def f(x):
            for call in (lambda: os.setpriority(os.PRIO_PROCESS, 1, 19), lambda: os.sched_setaffinity(1, {0}),
                         lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))):
                try: call(); return "escaped"
                except OSError: pass
        """,
    "changes the mode of its input": "def f(x): os.fchmod(0, os.fstat(0).st_mode); return 'escaped'",
    "leaves a note in the times of its input": "def f(x): os.utime(0); return 'escaped'",
    "lists the root": "def f(x): return 'escaped' if os.listdir('/') else 0",
    "reads the users": "def f(x): return 'escaped' if open('/etc/passwd').read() else 0",
    "reads the environment of others": """
        def f(x):
            for pid in ("1", "self", str(os.getppid())):
                if open(f"/proc/{pid}/environ").read() is not None: return "escaped"
        """,
    "finds the secret in its environment": """
        def f(x): return "escaped" if os.environ.get("SECRET") else 0
        """,
    "writes into the library": """
        def f(x):
            open(os.path.join(os.path.dirname(os.__file__), "zzz.py"), "w").write("")
            return "escaped"
        """,
    "runs a shell": "def f(x): return 'escaped' if os.system('true') == 0 else 0",
    "runs a program": """
        import subprocess
        def f(x): return subprocess.run([sys.executable, "-c", "print('escaped', end='')"], capture_output=True).stdout.decode()
        """,
    "runs a program of its own": """
        def f(x):
            open("run", "w").write("#!/bin/sh\\nexit 0\\n")
            os.chmod("run", 0o777)
            return "escaped" if os.spawnv(os.P_WAIT, "./run", ["run"]) == 0 else 0
        """,
    "connects": """
        import socket
        def f(x):
            socket.create_connection(("1.1.1.1", 53), timeout=0.3)
            return "escaped"
        """,
    "listens": """
        import socket
        def f(x):
            server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()
            socket.create_connection(server.getsockname(), timeout=0.3)
            return "escaped"
        """,
    "kills its elders": """
        def f(x):
            for pid in (1, os.getppid()): os.kill(pid, signal.SIGKILL)
            return "escaped" if os.getppid() != 1 else 0
        """,
    "kills everyone": "def f(x): os.kill(-1, signal.SIGKILL); return 0",
    "mounts": """
        def f(x):
            libc = ctypes.CDLL(None)
            libc.unshare(0x10000000 | 0x20000)
            os.mkdir("m")
            return "escaped" if libc.mount(b"proc", b"m", b"proc", 0, None) == 0 else 0
        """,
    "changes the root": """
        def f(x):
            ctypes.CDLL(None).unshare(0x10000000)
            os.chroot(".")
            return "escaped"
        """,
    "becomes root": "def f(x): os.setuid(0); return 'escaped'",
    "imports the project": "def f(x): import train; return 'escaped'",
    "meets another program": """
        import socket
        def f(x):
            one, two = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
            one.bind("\\0meeting-point-" + "@NUMBER@"); one.listen()
            if "@NUMBER@" == "1": time.sleep(0.3); return 0
            two.connect("\\0meeting-point-1")
            return "escaped"
        """,
}
