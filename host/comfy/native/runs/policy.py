"""Policy for one run of a native model, and changes between two model calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from weakref import ref

import comfy.model_management
import torch
from torch import nn

from .....bench import policy_name
from .....block_kernels import TokenChunks
from .....devices import forget, is_out_of_memory, runtime_for
from .....devices.machine import available_bytes
from .....plan import (
    AVAILABLE_SHARE,
    WORTH,
    Budgets,
    PassPlan,
    bytes_to_free,
    describe_policy,
    describe_ram,
    next_smaller_policy,
    plan_passes,
)
from .....sampling.steps import InsufficientMemoryError
from .....schema import OffloadPolicy
from .....schema.records import StepRecord
from .....schema.text import format_seconds
from ....auto_policy import smaller_limit
from ... import versions
from ..streamed.patcher import NativePatcher
from ..streamed.weights import STACK
from .hooks import Learnt
from .lanes import VisitSharing

logger = logging.getLogger("wanstream.host")

LAST_CHUNKS = (4096,)
"""Tokens per chunk after a call ran out of memory without a resident block. There is one try,
because each try repeats the call."""

BATCH_MARGIN = 1.5
"""Multiple of the estimate for several conditions. ComfyUI computes them in one pass if this much
is free."""


class NativePolicy:
    """`SessionPolicy` for a run.

    Args:
        patcher: the MODEL, loaded by ComfyUI.
        learnt: facts from earlier runs.
        free_vram: returns the free GPU memory, in bytes.
        calls_done: returns the number of model calls so far.

    Attributes:
        sharing: decides whether conditions share visits.
        chunks: chunked feed-forwards.
        notes: sentences about the run, for the timeline.
    """

    def __init__(
        self,
        patcher: NativePatcher,
        learnt: Learnt,
        *,
        free_vram: Callable[[], int],
        calls_done: Callable[[], int],
    ) -> None:
        self.notes: list[str] = []
        self._weights = patcher.weights
        self._memory = patcher.memory
        self._device = patcher.load_device
        self._auto = patcher.auto
        self._learnt = learnt
        self._free_vram = free_vram
        self._calls_done = calls_done
        self._attempts = 0
        self._replaced: OffloadPolicy | None = None
        """Policy before the revision that followed the current call."""
        self.sharing = VisitSharing(
            patcher.streaming.share_visits,
            learnt,
            automatic=patcher.auto is not None,
            free_bytes=free_vram,
            note=self.note,
        )
        # A weak reference: a model's last run is kept, and must not keep the model alive.
        self.chunks = TokenChunks(partial(_plain_blocks, ref(patcher)), self.note)

    @contextmanager
    def chunked(self) -> Iterator[None]:
        """Compute feed-forwards in the policy's chunks during the `with` body."""
        assert self._memory.policy is not None, "the model is loaded"
        try:
            self.chunks.use(self._memory.policy.chunk_tokens or self._learnt.chunk_tokens)
            yield
        finally:
            self.chunks.use(None)

    def revised(self, record: StepRecord) -> OffloadPolicy | None:
        """Return a faster policy after the first model call of a kind. Automatic policies only."""
        sharing = self.sharing
        learnt = sharing.key in self._learnt.shares
        if self._auto is None or sharing.active or self._attempts or learnt:
            return None
        together = apart = None
        if sharing.lanes > 1:
            together = self._predict_fastest(record, self._auto.budgets, shared=True)
        if sharing.lanes == 1 or not sharing.is_required:
            apart = self._predict_fastest(record, self._auto.budgets)
        # Larger activations must be worth the memory.
        shares = together is not None and (
            apart is None or together.call_s < (1 - WORTH) * apart.call_s
        )
        self._learnt.shares[sharing.key] = shares
        chosen = together if shares else apart
        if chosen is None or chosen.policy == self._memory.policy:
            return None
        self.note(
            f"after the first call: {describe_policy(chosen.policy, len(self._weights.blocks))}, "
            f"{describe_ram(chosen.policy)}, {format_seconds(chosen.call_s)} s per call predicted"
        )
        return chosen.policy

    def use(self, policy: OffloadPolicy) -> None:
        """Continue under a policy from `revised`, or under the current one if memory is short."""
        self._replaced = self._memory.policy
        try:
            self._load(policy)
        # Other processes may have allocated memory since the measurement.
        except (OSError, RuntimeError) as err:
            if isinstance(err, RuntimeError) and not is_out_of_memory(err):
                raise
            self._keep_replaced(forget(err))

    def make_smaller(self, message: str) -> None:
        """Continue without shared visits or under a smaller policy.

        Raises InsufficientMemoryError if there is no smaller policy.
        """
        weights = self._weights
        assert self._memory.policy is not None, "the model is loaded"
        present = replace(self._memory.policy, chunk_tokens=self.chunks.chunk_tokens)
        call = self._calls_done()
        # The revised policy did not fit, so the policy before the revision comes back first.
        if self._replaced is not None:
            self._keep_replaced(message)
            return
        if self.sharing.can_stop:
            self.sharing.stop()
            self.note(f"out of memory in call {call}: the conditions no longer share visits")
            self._load(present)
            comfy.model_management.soft_empty_cache()
            return
        smaller = next_smaller_policy(
            present,
            weights.block_counts,
            missing=bytes_to_free(
                self._attempts, block=weights.buffer_bytes, working_bytes=0, free_bytes=None
            ),
            chunks=LAST_CHUNKS if self.chunks.may_help else (),
            device_bytes=weights.device_bytes,
        )
        if smaller is None:
            raise InsufficientMemoryError(
                f"{message}. No block is resident, so the policy cannot get smaller: make the "
                "video or image smaller, or its batch"
            )
        change = f"{policy_name(smaller)} instead of {policy_name(present)}"
        if smaller.chunk_tokens != present.chunk_tokens:
            self._learnt.chunk_tokens = smaller.chunk_tokens
            change = f"feed-forwards of {smaller.chunk_tokens} tokens at once"
        self._attempts += 1
        self.note(f"out of memory in call {call}: {change}")
        self._load(smaller)
        # Otherwise torch keeps freed buffers, perhaps in sizes unsuitable for the next attempt.
        comfy.model_management.soft_empty_cache()

    def note(self, text: str) -> None:
        """Log a sentence about the run and add it to the timeline."""
        if text not in self.notes:
            logger.info("%s", text)
            self.notes.append(text)

    def call_ended(self) -> None:
        """Accept the last revision: a call has completed under it without running out of memory."""
        if self._replaced is not None and self._memory.policy is not None:
            self._memory.requested = self._memory.policy
            self._replaced = None

    def _predict_fastest(
        self, record: StepRecord, budgets: Budgets, *, shared: bool = False
    ) -> PassPlan | None:
        """Return the fastest policy for calls like `record`'s, with or without `shared` visits."""
        assert self._memory.policy is not None, "the model is loaded"
        sharing = self.sharing
        activations = sharing.pass_bytes
        passes = sharing.passes
        if shared:
            activations = sharing.lanes_bytes
            passes = sharing.shared_passes
        elif sharing.batched > 1:
            activations = int(BATCH_MARGIN * sharing.batched * activations)
        return plan_passes(
            self._weights.costs,
            record,
            passes=passes,
            present=self._memory.policy,
            budgets=self._free(budgets, activations),
            has_bus=self._weights.has_bus,
            keep_present=not shared,
        )

    def _free(self, budgets: Budgets, activations: int) -> Budgets:
        """Return the budgets, limited to memory that is free or already holds the weights."""
        usable = self._weights.loaded_bytes - activations
        ram = int(AVAILABLE_SHARE * available_bytes())
        if runtime_for(self._device) is None:
            return Budgets(ram_bytes=smaller_limit(budgets.ram_bytes, max(0, ram + usable)))
        return Budgets(
            vram_bytes=smaller_limit(budgets.vram_bytes, max(0, self._free_vram() + usable)),
            ram_bytes=smaller_limit(budgets.ram_bytes, ram),
        )

    def _keep_replaced(self, message: str) -> None:
        """Undo the last revision, because it did not fit into memory."""
        kept = self._replaced
        self._replaced = None
        assert kept is not None, "the model is loaded"
        self.note(f"{policy_name(kept)} is kept: {message}")
        self._load(kept)

    def _load(self, policy: OffloadPolicy) -> None:
        with torch.inference_mode(False):  # buffers outlive the run
            self._weights.engine(policy, self._device)
        self._memory.policy = policy
        self.chunks.use(policy.chunk_tokens or self._learnt.chunk_tokens)


def _plain_blocks(model_of_run: ref[NativePatcher]) -> dict[str, nn.Module]:
    """Return a MODEL's blocks by path, without blocks that are compiled wholly or partly.

    A compiled block would be traced again for each replaced method.
    """
    patcher = model_of_run()
    assert patcher is not None, "the sampler holds the MODEL of its run"
    compiled = [f"{name}." for name in versions.compiled_modules(patcher)]
    blocks: dict[str, nn.Module] = {}
    for stack, model in zip(patcher.weights.stacks, patcher.models(), strict=True):
        for path in patcher.weights.blocks:
            # By path: another node may have replaced a block with a wrapper.
            block = model.diffusion_model.get_submodule(path)
            name = f"diffusion_model.{path}."
            # All end with a dot, so that `blocks.1` does not match `blocks.10`.
            if any(name.startswith(each) or each.startswith(name) for each in compiled):
                continue
            if not any(module._compiled_call_impl is not None for module in block.modules()):
                blocks[f"{stack}.{path}".removeprefix(f"{STACK}.")] = block
    return blocks
