"""Context parallelism of diffusers on an engine's models, with the attention backends that allow it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...schema import MeshError

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel
    from diffusers.models._modeling_parallel import ParallelConfig

    from ...wan import ExpertEngine
    from .groups import ProcessGroups


WITH_LSE = frozenset({"flash", "flash_hub", "_flash_3_hub", "_native_cudnn", "_native_flash"})
"""Backends of diffusers 0.37 to 0.39 that return the log-sum-exp beside the result."""
RING_BACKEND = "_native_flash"
"""PyTorch's own; it needs CUDA, and bf16 or fp16."""
HALF = (torch.bfloat16, torch.float16)


def backend_for(
    set_backend: str | None, *, ring: int, ulysses: int, device: torch.device, dtype: torch.dtype
) -> str | None:
    """The backend of a self-attention that has `set_backend` (None: diffusers' default), or the one that it needs
    instead.

    Raises MeshError where attention of that dtype on that device cannot be shared in that way.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    name = _AttentionBackendRegistry.get_active_backend()[0] if set_backend is None else set_backend
    name = str(AttentionBackendName(name).value)
    sharing = _AttentionBackendRegistry._supports_context_parallel
    if ring == 1:
        if name not in sharing:
            raise MeshError(
                f"ulysses {ulysses}: the attention backend {name!r} cannot be shared by workers; choose one of "
                f"{', '.join(sorted(sharing))}"
            )
        return set_backend
    if name in WITH_LSE and name in sharing:
        return set_backend
    if name == AttentionBackendName.NATIVE.value and device.type == "cuda" and dtype in HALF:
        return RING_BACKEND
    raise MeshError(
        f"ring {ring}: the attention backend {name!r} gives no log-sum-exp on {device.type} in {_word(dtype)}, which a "
        f"ring needs; use ulysses {ring * ulysses} instead, or bf16 on a GPU"
    )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


AXES = ("ring", "ulysses")
"""diffusers' names, and ours."""


class ContextMesh:
    """What diffusers asks of a DeviceMesh, answered by groups that exist already.

    A DeviceMesh makes groups of its own when it is flattened, at a time that is not ours.
    """

    def __init__(self, groups: ProcessGroups, axes: tuple[str, ...] = AXES) -> None:
        self._groups, self._axes = groups, axes

    def __getitem__(self, axes: str | tuple[str, ...]) -> ContextMesh:
        return ContextMesh(self._groups, (axes,) if isinstance(axes, str) else axes)

    def _flatten(self) -> ContextMesh:
        return self

    def size(self) -> int:
        """How many workers there are along these axes."""
        degrees = dict(self._groups.mesh.degrees)
        size = 1
        for axis in self._axes:
            size *= degrees[axis]
        return size

    def get_group(self) -> dist.ProcessGroup:
        """Those workers."""
        return self._groups.group(self._axes[0] if len(self._axes) == 1 else "context")

    def get_local_rank(self) -> int:
        """The place of this worker among them."""
        return dist.get_rank(self.get_group()) if self.size() > 1 else 0


@contextmanager
def shared_tokens(groups: ProcessGroups, engine: ExpertEngine) -> Iterator[None]:
    """While this lasts, the engine's models compute this worker's tokens; afterwards they are as they were.

    Hooks that are put on the models inside must be taken off before.

    Raises MeshError where the heads cannot be shared out evenly, or attention on this device not at all.
    """
    with ExitStack() as attached:
        for model in engine.models.bare.values():
            attached.enter_context(_attached(model, groups))
        yield


def check_tokens(tokens: int, groups: ProcessGroups) -> None:
    """Refuse lanes whose tokens cannot be shared out evenly, with MeshError."""
    ring, ulysses = groups.mesh.ring, groups.mesh.ulysses
    if tokens % (ring * ulysses):
        raise MeshError(
            f"ring {ring} x ulysses {ulysses} cannot share out {tokens} tokens evenly: choose other degrees, or "
            "another size or length of the video"
        )


@contextmanager
def _attached(model: WanTransformer3DModel, groups: ProcessGroups) -> Iterator[None]:
    from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    mesh, heads = groups.mesh, model.config.num_attention_heads
    if heads % mesh.ulysses:
        raise MeshError(f"ulysses {mesh.ulysses} cannot share out {heads} heads evenly: choose another degree")
    parallel = ContextParallelConfig(ring_degree=mesh.ring, ulysses_degree=mesh.ulysses)
    config = ParallelConfig(context_parallel_config=parallel)
    config.setup(groups.place, groups.size, groups.device, mesh=ContextMesh(groups))
    # The model's own forward, which the plan's nameless entry is for, is never called.
    plan = {name: part for name, part in model._cp_plan.items() if name}
    dtype = model.patch_embedding.weight.dtype
    with ExitStack() as attached:
        for name in plan:
            attached.enter_context(_restored(model.get_submodule(name), "forward", "_diffusers_hook"))
        for block in model.blocks:
            attached.enter_context(_sharing(block.attn1.processor, config, groups, dtype))
            counted = block.attn1.register_forward_pre_hook(_AttentionBytes(groups))
            attached.callback(counted.remove)
        attached.callback(model.proj_out.register_forward_hook(_OutputBytes(groups)).remove)
        attached.callback(remove_context_parallel, model, plan)
        apply_context_parallel(model, parallel, plan)
        yield


@contextmanager
def _sharing(processor: Any, config: ParallelConfig, groups: ProcessGroups, dtype: torch.dtype) -> Iterator[None]:
    """Self-attention is shared by the workers; a processor of attention to the text is left alone."""
    mesh = groups.mesh
    backend = backend_for(
        processor._attention_backend, ring=mesh.ring, ulysses=mesh.ulysses, device=groups.device, dtype=dtype
    )
    with _restored(processor, "_parallel_config", "_attention_backend"):
        processor._parallel_config, processor._attention_backend = config, backend
        yield


@contextmanager
def _restored(thing: object, *names: str) -> Iterator[None]:
    """Afterwards the object itself has what it has now under these names: the same, or nothing."""
    own = vars(thing)
    before = {name: own[name] for name in names if name in own}
    try:
        yield
    finally:
        for name in names:
            own.pop(name, None)
        own.update(before)


class _AttentionBytes:
    """Counts what a self-attention takes from other workers, by the tokens that it is given."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        ring, ulysses = groups.mesh.ring, groups.mesh.ulysses
        # Ulysses exchanges q, k, v and the result, of which its own part stays; a ring brings the other k and v.
        self._tensors = 4 * (ulysses - 1) / ulysses + 2 * (ring - 1)

    def __call__(self, module: object, given: tuple[torch.Tensor, ...]) -> None:
        self._groups.count_gathered(round(self._tensors * given[0].nbytes))


class _OutputBytes:
    """Counts what this worker takes from others where all tokens are put together again."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._tokens = groups.mesh.ring * groups.mesh.ulysses

    def __call__(self, module: object, given: object, output: torch.Tensor) -> None:
        self._groups.count_gathered(output.nbytes * (self._tokens - 1) // self._tokens)
