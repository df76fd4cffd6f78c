"""Component blocks that stream from a file during one call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from ...offload import attach_offload
from ...offload.formats import FileTensor, copy_together, streamed_names
from ...offload.sources import FileSource
from ...plan.programs import BlockKey
from ...schema import OffloadPolicy
from .components import ComponentFile
from .meta_model import called_before, set_parameters


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockStack:
    """Equal blocks of a model on `meta`."""

    name: str
    """Block name in transfer programs."""
    prefix: str
    """Prefix of the block parameters in the model, up to the block index."""
    model: nn.Module
    blocks: Sequence[nn.Module]

    @cached_property
    def names(self) -> dict[BlockKey, dict[str, str]]:
        """Full names of the streamed parameters, by block and by name within the block."""
        return {
            BlockKey(self.name, index): {
                name: f"{self.prefix}{index}.{name}" for name in streamed_names(block)
            }
            for index, block in enumerate(self.blocks)
        }

    @cached_property
    def streamed(self) -> frozenset[str]:
        """Full names of all streamed parameters."""
        return frozenset().union(*(names.values() for names in self.names.values()))

    @contextmanager
    def streaming(
        self,
        file: ComponentFile,
        dtype_of: Callable[[str], torch.dtype],
        *,
        device: torch.device,
        check: Callable[[], None],
        policy: OffloadPolicy | None = None,
        never: Collection[str] = (),
    ) -> Iterator[None]:
        """Stream the blocks from their file inside the `with`, and compute without gradients.

        Other parameters are read before, and stay on the device.

        Args:
            file: weights of the model.
            dtype_of: returns the compute dtype by parameter name.
            device: computes the blocks.
            check: called before every block. May raise to end the computation.
            policy: layerwise with one prefetched block by default.
            never: parameters to leave unread.
        """
        small = [name for name in file.weights if name not in self.streamed | {*never}]
        # Parameters stay in the model after this call, so they must not be inference tensors: a
        # later call outside inference mode could not compute with them.
        with torch.inference_mode(False):
            set_parameters(self.model, copy_together(file.read(small, dtype_of), device))

        def stored(tensors: Mapping[str, FileTensor]) -> dict[BlockKey, dict[str, FileTensor]]:
            return {
                key: {name: tensors[full] for name, full in names.items() if full in tensors}
                for key, names in self.names.items()
            }

        dtypes = {name: dtype_of(name) for name in streamed_names(self.blocks[0])}
        source = FileSource(
            stored(file.weights),
            computed_dtypes=dict.fromkeys(self.names, dtypes),
            scales=stored(file.scales),
        )
        policy = policy or OffloadPolicy.layerwise(1)
        with (
            attach_offload({self.name: self.blocks}, policy=policy, device=device, source=source),
            called_before(self.blocks, check),
            torch.no_grad(),
        ):
            yield
