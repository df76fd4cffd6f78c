"""Processes that share runs in split tests, and their jobs.

A job joins a rendezvous, computes a share and leaves.
"""

import itertools
import math
import os
import socket
import sys
import threading
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from diffusers.models import attention_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from wanstream.block_kernels import Kernels
from wanstream.block_kernels.block_math import TorchMath
from wanstream.distributed.messages import RendezvousSpec
from wanstream.distributed.worker.groups import ProcessGroups
from wanstream.distributed.worker.parallel_forward import group_forward
from wanstream.sampling import denoise
from wanstream.sampling.steps import RunSlice, SamplingCancelled
from wanstream.schema import OffloadPolicy
from wanstream.shapes import ExpertShape
from wanstream.testing.weights import TinyShape, make_expert
from wanstream.tests.support.wan.blocks import with_our_blocks
from wanstream.tests.support.wan.int8_attention import exact_attention, kitchen
from wanstream.tests.support.wan.quantised_files import in_dtype
from wanstream.wan import ExpertsRegistry, Lane, forward_lanes
from wanstream.wan.experts import engine
from wanstream.wan.transformer.compiled_block import get_compiler

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 100.0
"""Timeout reached only by a hung process."""

generations = itertools.count()


def row_id(value):
    """Return a short name of a mesh or of a policy for the names of tests."""
    if not isinstance(value, OffloadPolicy):
        return str(value)
    return "chunked" if value.chunk_tokens else value.kind


def free_port():
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])


def rendezvous(mesh, *, port=None, **changes):
    """Return one for each rank. `changes` are other values of `RendezvousSpec`."""
    given = {"mesh": mesh, "host": LOOPBACK, "port": port or free_port()}
    given |= {"generation": next(generations), "timeout_s": TIMEOUT_S, **changes}
    return [RendezvousSpec(rank=rank, **given) for rank in range(mesh.size)]


def join_groups(spec, device="cpu"):
    groups = ProcessGroups(spec, torch.device(device))
    groups.join()
    return groups


class SplitProcesses:
    """Processes on "cpu" or "cuda" that join as the ranks of one mesh. Call `leave` at the end."""

    def __init__(self, processes, device="cpu"):
        self.processes = processes
        self.device = device
        self.count = 0
        self.pids: list[int] = []

    def join(self, mesh, **changes):
        """Join with as many processes as the mesh has."""
        self.count = mesh.size
        self.pids = self.all(job_join, rendezvous(mesh, **changes), self.device)

    def leave(self):
        if self.count:
            self.all(job_leave)

    def all(self, job, *args):
        """Return this job's result on every rank."""
        return self.processes.all(job, *args, count=self.count)

    def run(self, *run):
        """Return the `job_run` result for experts, request and policy on every rank."""
        return self.all(job_run, *run, self.device)

    def alone(self, experts, request, policy, device=""):
        """Return the latents for the same run in the first process alone."""
        run = (experts, request, policy, device or self.device)
        return self.processes[0].start(job_run_alone, *run).result()

    def attention_with_lse(self):
        """Use attention with log-sum-exp, which a ring needs, on every rank."""
        return self._switched(job_use_attention_with_lse)

    def int8_attention(self):
        """Offer a kernel for attention "int8" on every rank, which computes exactly on the CPU."""
        return self._switched(job_offer_int8_attention)

    @contextmanager
    def _switched(self, job):
        self.all(job, True)
        try:
            yield
        finally:
            self.all(job, False)


def job_join(here, every, device):
    here.groups = join_groups(every[here.number], place_of(here, device))
    return os.getpid()


def job_leave_while_it_waits(here, name):
    threading.Timer(0.5, here.groups.leave).start()
    with here.groups.translate_errors("waited in vain"):
        given = torch.zeros(1, device=here.groups.device)
        torch.distributed.all_reduce(given, group=here.groups.group(name))
        given.item()


def job_leave(here):
    if hasattr(here, "groups"):
        here.groups.leave()


def place_of(here, device):
    return f"cuda:{here.number}" if device == "cuda" else device


def experts_of(here):
    """Return the registry of this process, which keeps experts open."""
    here.experts = getattr(here, "experts", None) or ExpertsRegistry()
    return here.experts


class Crossed(TorchDispatchMode):
    """Dispatch mode that adds up the bytes brought here by collectives from other processes."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("_c10d_functional.all_to_all_single"):
            size = torch.distributed.distributed_c10d._resolve_process_group(args[3]).size()
            self.nbytes += output.nbytes * (size - 1) // size
        elif name.startswith("_c10d_functional.all_gather_into_tensor"):
            self.nbytes += output.nbytes - args[0].nbytes
        elif name.startswith("c10d.allgather_"):
            outputs = args[0][0]
            inputs = args[1][0]
            self.nbytes += sum(tensor.nbytes for tensor in outputs) - inputs.nbytes
        return output


def compute(here, part, experts, request, policy, device="cpu", **options):
    """Return a run's latents on "cpu" or on this process's "cuda" device.

    The process keeps the experts open.
    """
    pair = experts_of(here).get(experts)
    device = place_of(here, device)
    return denoise(pair, request, part, policy=policy, device=device, **options).latents


def compute_share(here, *run, **options):
    """Return this process's share of a run."""
    return compute(here, RunSlice(split=group_forward(here.groups)), *run, **options)


def job_run(here, *run):
    """Return this process's share, and the bytes from other processes.

    The bytes are counted by the groups and by torch.
    """
    before = here.groups.gathered_bytes
    with Crossed() as crossed:
        latents = compute_share(here, *run)
    gathered = here.groups.gathered_bytes - before
    return {"latents": latents, "gathered": gathered, "crossed": crossed.nbytes}


def job_run_alone(here, *run):
    return compute(here, RunSlice(), *run)


def job_run_compiled(here, experts, *run):
    """This process's shares: blocks as they are, compiled, compiled again.

    And how often the compiler was at work.
    """
    shares = []
    for compiler in (None, "eager", "eager"):
        compute_with(here, experts, compiler)
        before = here.groups.gathered_bytes
        graphs = get_compiler("eager").graphs
        latents = compute_share(here, experts, *run)
        gathered = here.groups.gathered_bytes - before
        compiled = get_compiler("eager").graphs - graphs
        shares.append({"latents": latents, "gathered": gathered, "graphs": compiled})
    compute_with(here, experts, None)
    return shares


def compute_with(here, experts, compiler):
    """Open the experts, to be compiled by a torch backend that writes no kernels."""
    # Compiled blocks trace exact math.
    experts_of(here).get(experts).kernels = Kernels(math="exact", compiler=compiler)


def job_run_until(here, experts, request, policy, wishes, sent):
    """Stop, or send the signal `sent` to itself, from a number of polls on.

    `wishes` has the number for this process.
    """
    visits = itertools.count()

    def wish():
        now = next(visits) >= wishes.get(here.number, math.inf)
        if now and sent is not None:
            os.kill(os.getpid(), sent)
        return now

    try:
        compute_share(here, experts, request, policy, should_stop=wish)
    except SamplingCancelled as stopped:
        return stopped.step, stopped.block
    raise AssertionError("the run was not stopped")


def job_run_and_leave(here, experts, request, policy, visits):
    """Leave the rendezvous at a poll, as the driver makes it.

    Return the run's error and the number of polls.
    """
    polls = 0

    def poll():
        nonlocal polls
        polls += 1
        if polls == visits:
            here.groups.leave()
        return False

    try:
        compute_share(here, experts, request, policy, should_stop=poll)
    except ConnectionError as lost:
        return type(lost).__name__, polls
    raise AssertionError("the run did not end")


def job_hold(here, counting, dtype, lanes, chunk_tokens):
    """The most bytes held at once by a forward pass here, by the `Alive` in that file.

    And the estimate for it.
    """
    latent = (5, 40, 56)
    text = 16
    width = 512
    ffn_dim = 1382
    model = in_dtype(make_expert(TinyShape(heads=4, layers=2, ffn_dim=ffn_dim), seed=1), dtype)
    model = with_our_blocks(model, math=TorchMath(), chunk_tokens=chunk_tokens)
    inputs = [
        Lane(latents=torch.zeros(1, 16, *latent), text=torch.zeros(1, text, 4096, dtype=dtype))
    ] * lanes
    besides = [*model.parameters(), *model.buffers(), inputs[0].text]
    with (
        group_forward(here.groups).attached([model]),
        torch.no_grad(),
        here.load(counting).Alive(besides) as alive,
    ):
        forward_lanes(model, inputs, torch.tensor([900.0]), lambda block: nullcontext())
    mesh = here.groups.mesh
    shape = ExpertShape(width=width, ffn_width=ffn_dim)
    estimate = shape.working_bytes(
        [5 * 20 * 28] * lanes, value_bytes=dtype.itemsize, chunk_tokens=chunk_tokens, workers=mesh
    )
    # The estimate counts texts with 512 tokens, and the other expert's texts too.
    return alive.peak, estimate - (2 * lanes + 2) * 512 * width * dtype.itemsize


def job_use_attention_with_lse(here, used):
    """Register CPU attention for a ring, or use diffusers' own again, without log-sum-exp."""
    registry = attention_dispatch._AttentionBackendRegistry
    names = attention_dispatch.AttentionBackendName
    name = names._NATIVE_FLASH if used else names.NATIVE
    if used:
        registry.register(name, constraints=[], supports_context_parallel=True)(attention_with_lse)
    registry.set_active_backend(name)


def job_offer_int8_attention(here, offered):
    if offered:
        here.check_usable = engine.check_usable
        engine.check_usable = lambda *_: None
        sys.modules["comfy_kitchen"] = kitchen(partial(attention_of_all_tokens, here))
    else:
        engine.check_usable = here.check_usable
        del sys.modules["comfy_kitchen"]


def attention_of_all_tokens(here, query, key, value):
    here.seen = query.shape
    return exact_attention(query, key, value)


def job_seen(here):
    """Return the shape [B, H, S, D] of the last queries to the kernel for attention "int8"."""
    return tuple(here.seen)


def attention_with_lse(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    return_lse=False,
    _parallel_config=None,
):
    """See diffusers' backends: [B, S, heads, D] each."""
    if _parallel_config is None:
        return attended(query, key, value)[0]
    given = {"forward_op": attended_by_rank, "backward_op": None}
    given["_parallel_config"] = _parallel_config
    return attention_dispatch._templated_context_parallel_attention(query, key, value, **given)


def attended_by_rank(ctx, query, key, value, *_, **__):
    return attended(query, key, value)


def attended(query, key, value):
    """The result, and the scores' log-sum-exp [B, S, heads]."""
    scores = torch.einsum("bqhd,bkhd->bhqk", query.float(), key.float()) / query.shape[-1] ** 0.5
    lse = scores.logsumexp(-1)
    result = torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), value.float())
    return result.to(query.dtype), lse.transpose(1, 2)


def job_attach_and_detach(here, experts, policy):
    """Return ids of all attributes, or of a dictionary's values, around context parallelism.

    Before, in it and afterwards.
    """
    models = experts_of(here).get(experts).engine(policy, torch.device("cpu")).models
    modules = [module for model in models.bare.values() for module in model.modules()]

    def identities(own):
        return [*map(id, own.values())] if isinstance(own, dict) else id(own)

    def attributes():
        every = [item for owner in (*modules, models.settings) for item in vars(owner).items()]
        return [(name, identities(own)) for name, own in every]

    before = attributes()
    with group_forward(here.groups).attached(models.bare.values()):
        inside = attributes()
    return before, inside, attributes()
