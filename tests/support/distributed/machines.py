"""Machines for tests, simulated on this one.

Each has its own network, address, name, processes, /tmp and /dev/shm.

    with started_machines(folder, ["/srv", "/media", "/media"]) as machines:
        subprocess.run([*machines[0].enter, "ray", "start", "--head", ...])
        machines[2].end()

They are Linux namespaces, which only root can create. The machines are connected to a bridge in one
more network and are not visible outside. A machine ends when its first process ends, and that
process ends with this one. Only names remain then, which the end of the `with` removes.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

ADDRESSES = "198.18.0"
"""A network reserved for measuring other networks."""
WAIT_S = 30.0
CHECKOUT = Path(__file__).parents[3]
NEEDED = ("ip", "unshare", "nsenter", "mount", "hostname")

BEGIN = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/models" "$3"
# A checkout below /tmp is there on each machine.
case $4 in /tmp/*) mkdir -p "$2$4" && mount --bind "$4" "$2$4" ;; esac
mount --rbind "$2/tmp" /tmp
echo ready
read -r _ || true
"""


def refusal() -> str:
    """Return why machines cannot be created here, or empty if they can."""
    if sys.platform != "linux":
        return "namespaces are of Linux"
    if os.geteuid() != 0:
        return "only root can make namespaces"
    if gone := [program for program in NEEDED if shutil.which(program) is None]:
        return f"not installed: {', '.join(gone)} (Debian: iproute2, util-linux, hostname)"
    name = f"wanstream-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        _ip("netns", "del", name)
    return made.stderr.strip()


class Machine:
    """One machine.

    Args:
        models: the folder where the machine sees model files. They lie in `folder / "models"`.
    """

    def __init__(self, name: str, network: str, address: str, folder: Path, models: str) -> None:
        self.name = name
        self.address = address
        self.models = Path(models)
        self._folder = folder
        for each in ("tmp", "models"):
            (folder / each).mkdir(parents=True, exist_ok=True)
        own = ["--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        begin = ["bash", "-c", BEGIN, "begin", name, str(folder), models, str(CHECKOUT)]
        program = ["ip", "netns", "exec", network, "unshare", *own, *begin]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._first = subprocess.Popen(program, **pipes)
        if self._first.stdout.readline() != "ready\n":
            self._first.communicate(timeout=WAIT_S)
            raise OSError(f"{name} does not start; the reason is in its output")
        (self._inside,) = psutil.Process(self._first.pid).children()
        # Before the words of a program to run there.
        self.enter = f"nsenter --target {self._inside.pid} --net --mount --uts --ipc --pid".split()

    def write(self, path: str, text: str) -> None:
        """Write a file readable only by the owner to the machine's /tmp."""
        file = self._folder / "tmp" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_text(text, encoding="utf-8")

    def end(self) -> None:
        """Switch it off: every process in it is killed at once. Ending twice is allowed."""
        if self._first.poll() is None:
            processes = self._inside.children(recursive=True)
            self._first.kill()  # the machine's first process goes too, and takes all others with it
            self._first.wait(WAIT_S)
            psutil.wait_procs(processes, timeout=WAIT_S)
        self._first.stdin.close()
        self._first.stdout.close()


@contextmanager
def started_machines(folder: Path, models: Sequence[str]) -> Iterator[list[Machine]]:
    """Start machines that reach each other, and nothing else. In the end remove every trace.

    Args:
        models: by machine, as in `Machine`.
    """
    every: list[Machine] = []
    with ExitStack() as undo:

        def network(name: str) -> str:
            whole = f"wanstream-{os.getpid()}-{name}"
            _ip("netns", "add", whole)
            undo.callback(_ip, "netns", "del", whole)
            return whole

        bridge = network("bridge")
        _ip("-n", bridge, "link", "add", "switch", "up", "type", "bridge")
        for number, place in enumerate(models):
            name = f"machine-{number}"
            address = f"{ADDRESSES}.{number + 1}"
            own = network(str(number))
            veth = f"eth0 netns {own} type veth peer name {name} netns {bridge}"
            _ip("link", "add", *veth.split())
            _ip("-n", bridge, "link", "set", name, "up", "master", "switch")
            _ip("-n", own, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", own, "link", "set", device, "up")
            every.append(Machine(name, own, address, folder / name, place))
            undo.callback(every[-1].end)
        yield every


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=WAIT_S)
