"""Votes and exchanges between two workers on two machines with a delay between them.

The votes are before every block, and once per step.

python benchmarks/workers/worker_network.py [delay in ms]     (as root, for network namespaces)

Each worker is a process in a separate network namespace. Two TUN devices connect the namespaces.
This process moves packets between them, half of the delay later each way. "before" is the vote
before every block, "after" the vote before every step, as in a group on several machines.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch.utils._python_dispatch import TorchDispatchMode

from wanstream.benchmarks.record import record
from wanstream.distributed.messages import RendezvousSpec
from wanstream.distributed.worker.groups import ProcessGroups
from wanstream.distributed.worker.parallel_forward import group_forward
from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import RunSlice, seeded_noise
from wanstream.schema import Mesh, OffloadPolicy
from wanstream.testing.experts import save_expert_folder
from wanstream.testing.weights import TinyShape, make_expert
from wanstream.wan import open_experts
from wanstream.wan.latents import tensor_digest

ADDRESSES = ("198.18.7.1", "198.18.7.2")
"""Addresses in a network reserved for benchmarks."""
PORT = 29500
SHAPE = TinyShape(heads=2, layers=40)
STEPS = 20
LATENTS = {"divides": (16, 3, 8, 10), "does not divide": (16, 3, 6, 10)}
"""Latent shapes with 60 and 45 tokens."""
CASES = (
    (Mesh(cfg=2), "divides", STEPS),
    (Mesh(ulysses=2), "divides", 2),
    (Mesh(ulysses=2), "does not divide", 2),
)
"""Layout, tokens and steps. Runs with Ulysses take fewer steps, as each has hundreds of
exchanges."""
PINGS = 20
# The values are from linux/if_tun.h, CLONE_NEWNET from linux/sched.h.
TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
CLONE_NEWNET = 0x40000000
MOST_BYTES = 65536


class DelayedLink:
    """Two network namespaces connected with a delay in each direction. Use it in a `with`."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        """One-way delay for packets that arrive from now on."""
        self.names = [f"wanstream-{os.getpid()}-{side}" for side in "ab"]
        self._undo = ExitStack()
        self._ending = threading.Event()

    def __enter__(self) -> DelayedLink:
        with ExitStack() as undo:
            devices = []
            for name, address, other in zip(
                self.names, ADDRESSES, reversed(ADDRESSES), strict=True
            ):
                ip("netns", "add", name)
                undo.callback(ip, "netns", "del", name)
                devices.append(open_tun(name))
                undo.callback(os.close, devices[-1])
                ip("-n", name, "addr", "add", address, "peer", other, "dev", "tun0")
                for device in ("lo", "tun0"):
                    ip("-n", name, "link", "set", device, "up")
            moving = threading.Thread(target=self._move, args=(devices,), daemon=True)
            moving.start()
            # Callbacks run in reverse: the thread ends before the devices are closed.
            undo.callback(moving.join)
            undo.callback(self._ending.set)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _move(self, devices: list[int]) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()  # packets from the same moment keep their order
        while not self._ending.is_set():
            # `select` waits for the next packet, but at most 0.1 s, so the thread notices the end.
            left_s = min(0.1, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for device in select.select(devices, [], [], max(0.0, left_s))[0]:
                packet = os.read(device, MOST_BYTES)
                other = devices[1 - devices.index(device)]
                heapq.heappush(
                    waiting, (time.monotonic() + self.delay_s, next(numbers), other, packet)
                )
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(waiting)
                os.write(device, packet)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def open_tun(network: str) -> int:
    """Return the descriptor for a new TUN device `tun0` in a network namespace."""
    found: list[int] = []

    def make() -> None:
        namespace = os.open(f"/run/netns/{network}", os.O_RDONLY)
        # For this thread only, which ends here. Python has it from 3.12 on.
        if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns failed: run this as root")
        os.close(namespace)
        device = os.open("/dev/net/tun", os.O_RDWR)
        # A `struct ifreq` begins with the name in 16 bytes and the flags.
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"tun0", IFF_TUN | IFF_NO_PI))
        found.append(device)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return found[0]


class Exchanges(TorchDispatchMode):
    """Number of tensor exchanges between workers, and this worker's waiting time in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not name.startswith(("_c10d_functional.all_to_all", "_c10d_functional.all_gather")):
            return func(*args, **(kwargs or {}))
        self.count += 1
        return self.timed(func, *args, **(kwargs or {}))

    def timed(self, function: Callable[..., Any], *args: Any, **given: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **given)
        finally:
            self.seconds += time.perf_counter() - began


@contextmanager
def counted(groups: ProcessGroups, exchanges: Exchanges, votes: list[float]) -> Iterator[None]:
    """Record the seconds for every vote.

    Adds gathers, and waits for functional collectives, to `exchanges`.
    """
    decide = groups.any_wants
    gather = torch.distributed.all_gather
    wait = functional.wait_tensor

    def vote(wants: bool) -> bool:
        began = time.perf_counter()
        answer = decide(wants)
        votes.append(time.perf_counter() - began)
        return answer

    def all_gather(*args: Any, **given: Any) -> Any:
        exchanges.count += 1
        return exchanges.timed(gather, *args, **given)

    groups.any_wants = vote
    torch.distributed.all_gather = all_gather
    functional.wait_tensor = partial(exchanges.timed, wait)
    try:
        with exchanges:
            yield
    finally:
        groups.any_wants = decide
        torch.distributed.all_gather = gather
        functional.wait_tensor = wait


def request_of(latents: str, steps: int) -> DenoiseRequest:
    texts = torch.Generator().manual_seed(0)
    positive, negative = (torch.randn(1, 32, 4096, generator=texts) for _ in range(2))
    return DenoiseRequest(
        noise=seeded_noise((1, *LATENTS[latents]), 0),
        positive=positive,
        negative=negative,
        steps=steps,
        switch_step=steps // 2,
        flow_shift=5.0,
        guidance=(4.0, 3.0),
    )


def serve(rank: int, folder: str) -> None:
    """Worker: compute each run from stdin, and write figures to stdout."""
    torch.set_num_threads(1)
    with open_experts(Path(folder, "high"), Path(folder, "low")) as pair:
        for line in sys.stdin:
            given = json.loads(line)
            mesh = Mesh(**given["mesh"])
            spec = RendezvousSpec(
                rank=rank,
                mesh=mesh,
                host=ADDRESSES[0],
                port=PORT,
                generation=given["generation"],
                timeout_s=120.0,
                spans_machines=given["spans_machines"],
            )
            groups = ProcessGroups(spec, torch.device("cpu"))
            votes = list[float]()
            exchanges = Exchanges()
            groups.join()
            try:
                # Nothing else is under way during these votes, so they measure the link alone.
                pings = [timed_vote(groups) for _ in range(PINGS)]
                request = request_of(given["latents"], given["steps"])
                part = RunSlice(split=group_forward(groups))
                began = time.perf_counter()
                with counted(groups, exchanges, votes):
                    made = denoise(
                        pair,
                        request,
                        part,
                        policy=OffloadPolicy.resident(),
                        device="cpu",
                        should_stop=lambda: False,
                    )
                wall_s = time.perf_counter() - began
            finally:
                groups.leave()
            answer = {
                "digest": tensor_digest(made.latents),
                "median_vote_ms": 1e3 * statistics.median(pings),
                "wall_s": wall_s,
                "votes": len(votes),
                "votes_s": sum(votes),
                "exchanges": exchanges.count,
                "exchanges_s": exchanges.seconds,
            }
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


def timed_vote(groups: ProcessGroups) -> float:
    began = time.perf_counter()
    groups.any_wants(False)
    return time.perf_counter() - began


class Workers:
    """Both workers, each in its namespace."""

    def __init__(self, link: DelayedLink, folder: str) -> None:
        self._generations = itertools.count(1)
        self._processes = [
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    name,
                    sys.executable,
                    __file__,
                    "worker",
                    str(rank),
                    folder,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(link.names)
        ]

    def run(self, mesh: Mesh, latents: str, steps: int, *, spans_machines: bool) -> dict[str, Any]:
        """Return the first worker's figures. Both workers must have the same latents."""
        asked = {
            "mesh": dict(mesh.degrees),
            "latents": latents,
            "steps": steps,
            "spans_machines": spans_machines,
        }
        asked["generation"] = next(self._generations)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
        answers = [json.loads(self._line(process)) for process in self._processes]
        assert len({answer["digest"] for answer in answers}) == 1, "the workers disagree"
        return answers[0]

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a worker has ended; the reason is in its output above")
        return line


def figures_of(workers: Workers, link: DelayedLink, delay_ms: float) -> list[dict[str, Any]]:
    found = []
    for mesh, latents, steps in CASES:
        workers.run(mesh, latents, 2, spans_machines=True)  # opens the experts
        row: dict[str, Any] = {
            "layout": str(mesh),
            "tokens": latents,
            "steps": steps,
            "blocks": SHAPE.layers,
        }
        digests = set()
        for name in ("without delay", "before", "after"):
            link.delay_s = 0.0 if name == "without delay" else delay_ms / 2e3
            answer = workers.run(mesh, latents, steps, spans_machines=name != "before")
            link.delay_s = 0.0
            digests.add(answer.pop("digest"))
            row[name] = {key: round(value, 3) for key, value in answer.items()}
        row["equal_latents"] = len(digests) == 1
        before = row["before"]
        after = row["after"]
        row["ratio_of_votes"] = round(before["votes_s"] / after["votes_s"], 1)
        row["ratio_of_wall"] = round(before["wall_s"] / after["wall_s"], 2)
        found.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return found


def main(delay_ms: float) -> None:
    with tempfile.TemporaryDirectory() as folder, DelayedLink() as link:
        for seed, name in enumerate(("high", "low"), 1):
            save_expert_folder(
                make_expert(SHAPE, seed=seed), Path(folder, name), dtype=torch.float32
            )
        workers = Workers(link, folder)
        try:
            rows = figures_of(workers, link, delay_ms)
            load = os.getloadavg()[0]
        finally:
            workers.close()
    method = (
        "two workers in two network namespaces, connected by TUN devices between which a process "
        f"moves each packet {delay_ms / 2:g} ms later, so that a round trip takes {delay_ms:g} ms; "
        f"a random model of {SHAPE.layers} blocks per expert and {SHAPE.heads} heads, guidance 4 "
        "and 3, Gloo, one thread each. before: a vote on a stop before every block; after: before "
        "every step. Counts and seconds of one run per row on the first worker: votes, and "
        "exchanges of tensors and of sizes of token shares, each with the wait for the other "
        f"worker; wall_s is the whole run. median_vote_ms: {PINGS} votes before the run. tokens: "
        "whether they divide by the workers; if not, Ulysses exchanges the sizes of the shares too"
    )
    figures = {"delay_ms": delay_ms, "load_average": round(load, 1), "runs": rows}
    print(record("worker-network", method=method, figures=figures).read_text(encoding="utf-8"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        serve(int(sys.argv[2]), sys.argv[3])
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
