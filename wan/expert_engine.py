"""Both experts attached to one offload engine: one pool of buffers, so that the switch is a visit like any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from ..metrics import Recorder
from ..offload.attach import OffloadRun, attach_offload
from ..offload.file_source import FileSource
from ..offload.layout import streamed_names
from ..offload.safetensors_header import FileTensor
from ..plan import BlockKey, OffloadPolicy, Visit
from .checkpoint import Expert
from .expert_models import ExpertModels


class ExpertEngine:
    """Runs the blocks of the experts of one pair on one device under one policy.

    `models` holds the diffusers models by expert name; they are plain modules whose block weights are there during a
    visit only. Nothing is read before the engine exists but the files' headers.
    """

    def __init__(
        self,
        experts: Mapping[str, Expert],
        *,
        compute_dtype: torch.dtype,
        policy: OffloadPolicy,
        device: torch.device,
    ) -> None:
        self.device = device
        self.models = ExpertModels(experts, compute_dtype=compute_dtype, device=device)
        self.block_counts = {name: expert.config.num_layers for name, expert in experts.items()}
        self._handle = attach_offload(
            self.models.blocks,
            policy=policy,
            device=device,
            source=_block_source(experts, self.models, compute_dtype),
            follow_forward=False,
        )
        self.models.start_reading()
        self._closed = False

    @property
    def outer_bytes(self) -> int:
        """Bytes read so far that do not stream: what is outside the blocks, and the blocks' small tensors."""
        return self.models.outer_bytes

    def run(self, visits: Sequence[Visit], recorder: Recorder | None = None) -> AbstractContextManager[OffloadRun]:
        """Compile `visits` into a transfer program and start it.

        Inside the context, `run.visit(step, expert, block)` gives the visits in their order.
        """
        if self._closed:
            raise RuntimeError("this engine was closed; ask its pair for another one")
        return self._handle.run(visits, recorder=recorder)

    def close(self) -> None:
        """Free the buffers, threads and files. Closing twice is allowed.

        Raises:
            RuntimeError: a run is going on; it goes on undisturbed.
        """
        self._handle.detach()
        self._closed = True
        self.models.close()


def _block_source(experts: Mapping[str, Expert], models: ExpertModels, compute_dtype: torch.dtype) -> FileSource:
    """The streamed weights of every block, straight from the experts' files."""
    blocks: dict[BlockKey, dict[str, FileTensor]] = {}
    scales: dict[BlockKey, dict[str, FileTensor]] = {}
    for expert_name, stack in models.blocks.items():
        expert = experts[expert_name]
        for index, block in enumerate(stack):
            key, path = BlockKey(expert_name, index), f"blocks.{index}."
            names = streamed_names(block)
            blocks[key] = {name: expert.weights[path + name] for name in names}
            scales[key] = {name: expert.scales[path + name] for name in names if path + name in expert.scales}
    return FileSource(blocks, computed_dtypes=compute_dtype, scales=scales)
