"""What processes do in the tests of splits: they meet, compute their share of runs, and part."""

from __future__ import annotations

import itertools
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wanstream.distributed.groups import meet
from wanstream.distributed.tasks import Meeting
from wanstream.plan import ExpertsRef, OffloadPolicy
from wanstream.plan.mesh import Mesh
from wanstream.sampling import Cancelled, DenoiseRequest, Part, denoise_part
from wanstream.wan.registry import ExpertsRegistry

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 100.0
"""Only catches what hangs."""

generations = itertools.count()


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])


def meetings(mesh: Mesh, *, timeout_s: float = TIMEOUT_S, port: int | None = None) -> list[Meeting]:
    """One for each rank."""
    port, generation = port or free_port(), next(generations)
    return [
        Meeting(rank=rank, mesh=mesh, host=LOOPBACK, port=port, generation=generation, timeout_s=timeout_s)
        for rank in range(mesh.size)
    ]


def job_meet(here: SimpleNamespace, every: list[Meeting]) -> int:
    here.groups = meet(every[here.number], "cpu")
    return os.getpid()


def job_leave(here: SimpleNamespace) -> None:
    here.groups.leave()


class Crossed(TorchDispatchMode):
    """Adds up what collectives give this process that it did not have, as torch sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("_c10d_functional.all_to_all_single"):
            size = torch.distributed.distributed_c10d._resolve_process_group(args[3]).size()
            self.nbytes += output.nbytes * (size - 1) // size
        elif name.startswith("_c10d_functional.all_gather_into_tensor"):
            self.nbytes += output.nbytes - args[0].nbytes
        elif name.startswith("c10d.allgather_"):
            outputs, inputs = args[0][0], args[1][0]
            self.nbytes += sum(tensor.nbytes for tensor in outputs) - inputs.nbytes
        return output


def compute(
    here: SimpleNamespace, experts: ExpertsRef, request: DenoiseRequest, policy: OffloadPolicy, part: Part, **asked: Any
) -> torch.Tensor:
    """The latents of a run; the process keeps its experts open."""
    here.experts = getattr(here, "experts", None) or ExpertsRegistry()
    return denoise_part(here.experts.get(experts), request, part, policy=policy, device="cpu", **asked).latents


def job_run(here: SimpleNamespace, experts: ExpertsRef, request: DenoiseRequest, policy: OffloadPolicy) -> dict:
    """The share of this process; what came from others, as the groups count it and as torch sees it."""
    before = here.groups.gathered_bytes
    with Crossed() as crossed:
        latents = compute(here, experts, request, policy, Part(split=here.groups.split()))
    return {"latents": latents, "gathered": here.groups.gathered_bytes - before, "crossed": crossed.nbytes}


def job_run_alone(
    here: SimpleNamespace, experts: ExpertsRef, request: DenoiseRequest, policy: OffloadPolicy
) -> torch.Tensor:
    return compute(here, experts, request, policy, Part())


def job_run_until(
    here: SimpleNamespace,
    experts: ExpertsRef,
    request: DenoiseRequest,
    policy: OffloadPolicy,
    wishes: dict[int, int],
    sent: int | None,
) -> tuple[int, int]:
    """Stop, or with `sent` get that signal, where `wishes` say it: process -> how often it is asked before."""
    asked = itertools.count()

    def wish() -> bool:
        now = next(asked) == wishes.get(here.number, -1)
        if now and sent is not None:
            os.kill(os.getpid(), sent)
        return now

    part = Part(split=here.groups.split())
    try:
        compute(here, experts, request, policy, part, should_stop=here.groups.voting(wish))
    except Cancelled as stopped:
        return stopped.step, stopped.block
    raise AssertionError("the run was not stopped")


def with_loras(experts: ExpertsRef, loras: Any) -> ExpertsRef:
    return replace(experts, loras=loras)


Run = Callable[..., Any]
KILL, STOP, GO_ON = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
