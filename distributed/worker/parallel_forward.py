"""Forward passes in a worker group: lanes split over cfg ranks, tokens over ring and Ulysses ranks.

Tokens are split by diffusers' context parallelism, with suitable attention backends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...block_kernels import INT8_ATTENTION
from ...devices import dtype_name
from ...sampling.steps import LOCAL_FORWARD, AllReduced, ParallelForward
from ...schema import Mesh, MeshError, lanes_of_rank
from ...shapes import PATCH
from ...wan import Lane, changed, settings_of
from .groups import ProcessGroups

if TYPE_CHECKING:
    from diffusers import ContextParallelConfig, WanTransformer3DModel


WITH_LSE = frozenset({"flash", "flash_hub", "_flash_3_hub", "_native_cudnn", "_native_flash"})
"""Backends in diffusers 0.37 to 0.39 that return the log-sum-exp in addition to the result."""
RING_BACKEND = "_native_flash"
"""PyTorch's flash attention. It needs CUDA, and bf16 or fp16."""
HALF = (torch.bfloat16, torch.float16)


def backend_for(
    set_backend: str | None, mesh: Mesh, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return the backend for parallel self-attention: `set_backend` or a replacement.

    `set_backend` None means diffusers' default.

    Raises:
        MeshError: this device cannot parallelise attention in this dtype with these degrees.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    ring = mesh.ring
    ulysses = mesh.ulysses
    if set_backend == INT8_ATTENTION:
        if ring > 1:
            raise MeshError(
                f"ring {ring}: attention {INT8_ATTENTION!r} returns no log-sum-exp, which a ring "
                f"needs; use ulysses {ring * ulysses} instead, or attention 'sdpa'"
            )
        return set_backend
    name = _AttentionBackendRegistry.get_active_backend()[0] if set_backend is None else set_backend
    name = str(AttentionBackendName(name).value)
    parallel = _AttentionBackendRegistry._supports_context_parallel
    if name in (parallel if ring == 1 else parallel & WITH_LSE):
        return set_backend
    if ring == 1:
        raise MeshError(
            f"ulysses {ulysses}: the attention backend {name!r} does not support several workers; "
            f"choose one of {', '.join(sorted(parallel))}"
        )
    # CUDA's flash attention kernel returns one.
    if name == AttentionBackendName.NATIVE.value and device.type == "cuda" and dtype in HALF:
        return RING_BACKEND
    raise MeshError(
        f"ring {ring}: the attention backend {name!r} returns no log-sum-exp on {device.type} in "
        f"{dtype_name(dtype)}, which a ring needs; use ulysses {ring * ulysses} instead, or bf16 "
        "on a GPU"
    )


class ContextMesh:
    """The part of the DeviceMesh interface used by diffusers, backed by existing process groups.

    A real DeviceMesh creates a process group when diffusers flattens it. It would use torch's
    timeout of 30 minutes, at a time that `ProcessGroups` does not control, and with connections
    that it could not shut down.

    Args:
        axes: "ring", "ulysses", or both. The names are the same in diffusers and in `Mesh`.
    """

    def __init__(self, groups: ProcessGroups, *axes: str) -> None:
        self._groups = groups
        self._axes = axes

    def __getitem__(self, axes: str | tuple[str, ...]) -> ContextMesh:
        return ContextMesh(self._groups, *([axes] if isinstance(axes, str) else axes))

    def _flatten(self) -> ContextMesh:
        return self

    def size(self) -> int:
        """Return the number of workers along these axes."""
        return math.prod(getattr(self._groups.mesh, axis) for axis in self._axes)

    def get_group(self) -> dist.ProcessGroup:
        """Return these workers' process group."""
        return self._groups.group(self._axes[0] if len(self._axes) == 1 else "context")

    def get_local_rank(self) -> int:
        """Return this worker's rank in the group."""
        return dist.get_rank(self.get_group()) if self.size() > 1 else 0


@contextmanager
def context_parallel(
    groups: ProcessGroups, model: WanTransformer3DModel
) -> Iterator[ContextParallelConfig]:
    """Make a model compute only this worker's tokens, and restore it on exit.

    diffusers reads `ulysses_anything` from the yielded configuration in every forward pass. Set it
    before a pass whose tokens do not divide by the workers.

    Hooks added inside must be removed before the exit.

    Raises:
        MeshError: the heads cannot be split evenly, or this device cannot parallelise attention.
    """
    from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    mesh = groups.mesh
    heads = model.config.num_attention_heads
    if heads % mesh.ulysses:
        raise MeshError(
            f"ulysses {mesh.ulysses} cannot split {heads} heads evenly: choose another degree"
        )
    parallel = ContextParallelConfig(ring_degree=mesh.ring, ulysses_degree=mesh.ulysses)
    config = ParallelConfig(context_parallel_config=parallel)
    config.setup(
        groups.rank, groups.size, groups.device, mesh=ContextMesh(groups, "ring", "ulysses")
    )
    # The plan's unnamed entry is for the whole model's forward. `forward_lanes` does not call it.
    plan = {name: part for name, part in model._cp_plan.items() if name}
    dtype = model.patch_embedding.weight.dtype
    with ExitStack() as attached:
        # Restored by hand: diffusers replaces `forward`, and removing the hooks leaves attributes
        # behind.
        for module in map(model.get_submodule, plan):
            attached.enter_context(_restored(module, "forward", "_diffusers_hook"))
        settings = settings_of(model)
        backend = backend_for(settings.self_backend, mesh, groups.device, dtype)
        count = _attention_counter(groups)
        attached.enter_context(
            changed(settings, self_backend=backend, parallel=config, exchanging=count)
        )
        output = OutputHooks(groups, parallel)
        attached.callback(model.proj_out.register_forward_pre_hook(output.pad).remove)
        attached.callback(model.proj_out.register_forward_hook(output.cut_and_count).remove)
        attached.callback(remove_context_parallel, model, plan)
        apply_context_parallel(model, parallel, plan)
        yield parallel


@contextmanager
def _restored(thing: object, *names: str) -> Iterator[None]:
    """Restore these instance attributes on exit. An absent one is removed again."""
    before = {name: value for name, value in vars(thing).items() if name in names}
    try:
        yield
    finally:
        for name in names:
            vars(thing).pop(name, None)
        vars(thing).update(before)


class OutputHooks:
    """Output projection hooks: equal token shares for the gather, and bytes received.

    diffusers gathers unequal shares by `all_gather` with unequal tensors. gloo refuses them (in
    torch 2.11 and 2.13).
    """

    def __init__(self, groups: ProcessGroups, parallel: ContextParallelConfig) -> None:
        self._groups = groups
        self._parallel = parallel
        self._shares: list[int] = []

    def pad(self, module: object, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        """Append zeros to tokens [1, S, D] up to the largest share."""
        if not self._parallel.ulysses_anything:
            return None
        from diffusers.models._modeling_parallel import gather_size_by_comm

        tokens = inputs[0].shape[1]
        self._shares = gather_size_by_comm(tokens, self._groups.group("context"))
        return (torch.nn.functional.pad(inputs[0], (0, 0, 0, max(self._shares) - tokens)),)

    def cut_and_count(self, module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        """Cut off the zeros from `pad` on each worker, and count other workers' tokens."""
        if self._parallel.ulysses_anything:
            parts = output.chunk(len(self._shares), dim=1)
            output = torch.cat(
                [part[:, :share] for part, share in zip(parts, self._shares, strict=True)], dim=1
            )
        workers = self._parallel.ring_degree * self._parallel.ulysses_degree
        self._groups.count_gathered(output.nbytes * (workers - 1) // workers)
        return output


def _attention_counter(groups: ProcessGroups) -> Callable[[torch.Tensor], None]:
    """Return a function that counts the bytes a self-attention receives from other workers.

    The argument is the queries. With unequal shares, each other worker's share counts as if it were
    this worker's: one token more or less.
    """
    ring = groups.mesh.ring
    ulysses = groups.mesh.ulysses
    # Ulysses exchanges q, k, v and the result except for the own part. A ring sends k and v from
    # the other workers.
    tensors = 4 * (ulysses - 1) / ulysses + 2 * (ring - 1)

    def count(query: torch.Tensor) -> None:
        # Not `nbytes`: a compiled graph for any number of tokens cannot trace it.
        groups.count_gathered(round(tensors * query.numel() * query.element_size()))

    return count


class GroupForward(ParallelForward):
    """One worker's share in a group with two or more; see `ParallelForward`."""

    alone = False

    def __init__(self, groups: ProcessGroups) -> None:
        mesh = groups.mesh
        self._groups = groups
        self._configs: list[ContextParallelConfig] = []
        self._context_size = mesh.ring * mesh.ulysses
        """Number of workers that share a lane's tokens. Their group ranks are consecutive."""
        self.share = mesh

    @contextmanager
    def attached(self, models: Iterable[WanTransformer3DModel]) -> Iterator[None]:
        """See `ParallelForward.attached`.

        Raises MeshError if the mesh does not fit the experts or this device.
        """
        with ExitStack() as attached:
            if self._context_size > 1:
                self._configs = [
                    attached.enter_context(context_parallel(self._groups, model))
                    for model in models
                ]
            yield

    @contextmanager
    def computing(self, lanes: Sequence[Lane]) -> Iterator[Sequence[Lane]]:
        """See `ParallelForward.computing`.

        Raises:
            MeshError: a lane's tokens do not divide by a ring, or are fewer than the workers.
            WorkerTimeoutError: another worker did not respond within the rendezvous's timeout.
            PeerLostError: another worker is gone.
        """
        mesh = self._groups.mesh
        uneven = [lane for lane in lanes if lane.tokens(PATCH) % self._context_size]
        for lane in uneven:
            tokens = lane.tokens(PATCH)
            if mesh.ring > 1 or tokens < mesh.ulysses:
                others = ", or of its references" if lane.front or lane.behind else ""
                raise MeshError(
                    f"ring {mesh.ring} x ulysses {mesh.ulysses} cannot split {tokens} tokens "
                    "evenly: choose ring 1, other degrees, or another size or length of the "
                    f"video{others}"
                )
        for config in self._configs:
            # Only where needed: it costs size exchanges, and the host waits for them.
            config.ulysses_anything = bool(uneven)
        # torch cannot trace the size exchange, so compiled blocks compute these passes in eager
        # mode.
        traced = torch.compiler.set_stance("force_eager") if uneven else nullcontext()
        with traced, self._groups.translate_errors("computed a step"):
            if mesh.cfg == 1:
                yield lanes
            else:
                rank = dist.get_rank(self._groups.group("cfg"))
                yield lanes[lanes_of_rank(len(lanes), rank)]

    def gather(self, velocities: list[torch.Tensor], lanes: int) -> list[torch.Tensor]:
        """See `ParallelForward.gather`. All workers return the same bits."""
        if self._groups.mesh.cfg == 1:
            return velocities
        computed = torch.stack(velocities)
        first = torch.empty_like(computed)
        last = torch.empty_like(computed)
        self._groups.exchange(dist.all_gather, [first, last], computed, group="cfg")
        self._groups.count_gathered(computed.nbytes)
        # Both halves have the middle lane of an odd count. All workers use the first half's.
        return [*first, *last[2 * len(last) - lanes :]]

    def any_stops(self, stops: bool, block: int) -> bool:
        """See `ParallelForward.any_stops`.

        On several machines, a stop takes effect before the next step. A vote before every block
        would cost a network round trip each: 800 in 20 steps with 40 blocks.

        Raises:
            WorkerTimeoutError: a worker did not call within the rendezvous's timeout.
            PeerLostError: a worker is gone, or this one has left the rendezvous.
        """
        if block > 0 and self._groups.rendezvous.spans_machines:
            # After an error elsewhere, for example a memory shortage, the driver makes all workers
            # leave. Without a vote this one would compute the rest of the step first.
            self._groups.check_not_left()
            return False
        return self._groups.any_wants(stops)

    def local_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `ParallelForward.local_tokens`.

        The split is the same as in diffusers' context parallelism.
        """
        shares = self._context_size
        if shares == 1:
            return tokens
        # Equal parts are those of `chunk`, with which diffusers splits totals that divide evenly.
        return tokens.tensor_split(shares, dim=1)[self._groups.rank % shares]

    def all_reduce_sums(self, sums: torch.Tensor) -> AllReduced:
        """See `ParallelForward.all_reduce_sums`.

        Raises:
            WorkerTimeoutError: a worker did not call within the rendezvous's timeout.
            PeerLostError: a worker is gone.
        """
        parts = self._groups.all_gather_cpu(sums, "waited for the values of its group")
        shares = self._context_size
        # Every worker adds in the same order, so the sums are bit-equal everywhere.
        totals = [
            torch.stack(parts[first : first + shares]).sum(dim=0)
            for first in range(0, len(parts), shares)
        ]
        return AllReduced(totals[self._groups.rank // shares], torch.cat(totals))


def group_forward(groups: ProcessGroups) -> ParallelForward:
    """Return the strategy by which this worker group shares forward passes."""
    return LOCAL_FORWARD if groups.size == 1 else GroupForward(groups)
