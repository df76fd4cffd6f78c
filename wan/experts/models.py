"""Models of both experts, with all unstreamed parameters.

Resident parameters are small, 16 MB per A14B expert: patch embedding, output projection, and the
biases, norms and modulation tables in the blocks. A model look-up loads them. The time and text
embedders (0.5 GB per expert) are on the device only while the run's embeddings are computed, see
`transformer/embedders.py`. They are read ahead into RAM, each part for one expert at a time. A part
kept for the next run is dropped before the other expert's is read, and read again later.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from ...block_kernels import CODE_FORMATS, multiplications, replace_linears
from ...devices import clock_for, runtime_for
from ...devices.machine import insufficient_ram
from ...offload import LockedTensors, WeightPatch, write_sum
from ...offload.formats import EightBit, FileTensor, copy_together
from ...offload.sources import InsufficientRamError, read_scales, read_tensors
from ..checkpoint.detect import WanConfig
from ..checkpoint.meta_model import (
    PARTS,
    EmbedderPart,
    decoded,
    embedder_part,
    model_on_meta,
    parameter_dtype,
    position_tables,
    set_parameters,
    streamed_parameters,
)
from ..checkpoint.open import Expert
from ..lora.apply import PatchedParameters
from ..transformer.block import BlockSettings, replace_blocks
from ..transformer.embedders import CachedEmbedder
from ..transformer.token_parts import AxisTables

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel

Tensors = dict[str, torch.Tensor]

Read: TypeAlias = "tuple[Tensors, Tensors, LockedTensors | None]"
"""Stored tensors, scales, and the page-lock of embedder tensors for a device."""

Part: TypeAlias = "tuple[str, EmbedderPart | None]"
"""Expert, and the parameters to read together: an embedder part, or None for the resident
parameters."""


class ExpertModels(Mapping[str, "WanTransformer3DModel"]):
    """Models by expert name. A look-up waits until the model's resident parameters are loaded.

    A reader thread reads raw bytes, and the calling thread decodes them. All calls must come from
    one thread.

    Args:
        experts: experts by name.
        compute_dtype: block activation dtype.
        device: device for the parameters.
        multiplied: packing of layers multiplied as stored, by expert and name within `blocks`.

    Attributes:
        bare: models by expert name, for installing hooks. A look-up here does not wait for
            parameters.
        settings: block settings for all models.
        reads_for_next_run: once a run's embeddings are computed, read the first expert's embedder
            again and keep it in RAM. The next run, with another text or other timesteps, starts
            with it, so the first step need not wait for the file.
        non_block_bytes: unstreamed bytes read and loaded so far.
    """

    def __init__(
        self,
        experts: Mapping[str, Expert],
        *,
        compute_dtype: torch.dtype,
        device: torch.device,
        multiplied: Mapping[str, Mapping[str, EightBit]],
    ) -> None:
        self.settings = BlockSettings()
        self.bare = {
            name: _model(expert.config, compute_dtype, self.settings)
            for name, expert in experts.items()
        }
        self._scaled_layers = {
            name: replace_linears(model.blocks, multiplied.get(name, {}))
            for name, model in self.bare.items()
        }
        packings = chain.from_iterable(layers.values() for layers in multiplied.values())
        # Chosen before anything is read, because it may raise.
        formats = dict.fromkeys(CODE_FORMATS[packing.dtype] for packing in packings)
        self._multiplications = multiplications(formats, device, compute_dtype)
        self.reads_for_next_run = False
        self.non_block_bytes = 0
        self._experts = experts
        self._stored = {
            (name, part): _tensors(expert, part)
            for name, expert in experts.items()
            for part in (None, *PARTS)
        }
        self._compute_dtype = compute_dtype
        self._device = device
        # One thread: parts are read in the order of submission, one at a time.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wanstream-outer")
        self._runtime = runtime_for(device)
        self._reads: dict[Part, Future[Read]] = {}
        self._patches: Mapping[str, Sequence[Mapping[str, WeightPatch]]] = {}
        self._selected = dict.fromkeys(experts, 0)
        self._loaded: dict[str, PatchedParameters] = {}
        self._embedders: dict[str, CachedEmbedder] = {
            name: model.condition_embedder for name, model in self.bare.items()
        }
        self._first = next(iter(experts))
        """First expert in the last run."""
        for name, embedder in self._embedders.items():
            embedder.weight_loader = partial(self._with_embedder, name)

    @property
    def blocks(self) -> dict[str, list[nn.Module]]:
        """Blocks by expert name. Does not wait for parameters."""
        return {name: list(model.blocks) for name, model in self.bare.items()}

    @property
    def loaded_bytes(self) -> int:
        """Device memory for loaded resident parameters and position tables, in bytes."""
        parameters = [
            self.bare[name].get_parameter(full)
            for name in self._loaded
            for full in self._stored[name, None]
        ]
        tables = [table for name in self._loaded for table in self.bare[name].rope.buffers()]
        return sum(tensor.nbytes for tensor in (*parameters, *tables))

    @property
    def kept_bytes(self) -> int:
        """RAM for the embedder read ahead for the next run, in bytes."""
        kept = [
            self._stored[name, part]
            for name, part in list(self._reads)
            if part is not None and self._is_for_next_run(name)
        ]
        return sum(tensor.stored_bytes for tensors in kept for tensor in tensors.values())

    @property
    def pinned_bytes(self) -> int:
        """Page-locked RAM for the embedders read ahead, in bytes."""
        ended = [
            read for read in list(self._reads.values()) if read.done() and not read.cancelled()
        ]
        locked = [read.result()[2] for read in ended if read.exception() is None]
        return sum(each.nbytes for each in locked if each is not None)

    def set_patches(self, patches: Mapping[str, Sequence[Mapping[str, WeightPatch]]]) -> None:
        """Replace the patches for unstreamed parameters, by expert, and select the first of each.

        Loaded models change at once, the others when they are looked up. Cached rows from changed
        embedders are invalidated, and only those embedders' weights are read again.
        """
        before = {name: self._selected_patches(name) for name in self.bare}
        self._patches = patches
        self._selected = dict.fromkeys(self.bare, 0)
        for name in self.bare:
            self._apply_patches(name, before[name])

    def select_patch(self, name: str, number: int) -> None:
        """Select one of an expert's patches, in or between runs, as `set_patches` does.

        Nothing changes if it is selected already. A streamed block takes its stack from its visit.
        """
        if number == self._selected[name]:
            return
        before = self._selected_patches(name)
        self._selected[name] = number
        self._apply_patches(name, before)

    def _apply_patches(self, name: str, before: Mapping[str, WeightPatch]) -> None:
        """Apply an expert's selected patches, in place of the patches `before`."""
        changed = {
            embedder_part(parameter) for parameter in (*before, *self._selected_patches(name))
        }
        for part in PARTS:
            if part in changed:
                self._embedders[name].invalidate(part)
        if name in self._loaded:
            self._loaded[name].set(self._resident_patches(name))

    def _selected_patches(self, name: str) -> Mapping[str, WeightPatch]:
        patches = self._patches.get(name)
        return patches[self._selected[name]] if patches else {}

    def prefetch_embeddings(
        self, timesteps: Mapping[str, Sequence[float]], texts: Mapping[str, Sequence[torch.Tensor]]
    ) -> None:
        """Set the next run's timesteps and texts by expert in run order, and start reading weights.

        All rows for an expert are computed when the first one is needed, so that the embedder
        weights (0.5 GB per expert) are loaded once and only for that time. Rows for the next expert
        are computed before the first step after their weights were read. Rows from an earlier run
        are reused. A run may use other timesteps and texts, but then these weights are read again.
        """
        for name, embedder in self._embedders.items():
            if name in timesteps:
                embedder.set_expected(timesteps[name], texts[name])
            else:
                embedder.clear_expected()
        self._first = next(iter(timesteps), self._first)
        # A list, because the loop removes entries.
        for name, part in [each for each in self._reads if each[1] is not None]:
            if part not in self._embedders[name].missing_parts and not self._is_for_next_run(name):
                # `cancel` does not end a read in progress. The tensors are freed with the future.
                self._reads.pop((name, part)).cancel()
        self._read_ahead()

    def start_reading(self) -> None:
        """Start reading the resident parameters of both experts."""
        # The first run needs the first expert's embedder before the second expert's parameters.
        for part in (None, *PARTS):
            self._start_reading((self._first, part))
        for name in self.bare:
            self._start_reading((name, None))

    def close(self) -> None:
        """Cancel pending reads, join the thread, and drop the models. Closing twice is allowed."""
        self._reader.shutdown(cancel_futures=True)
        self._reads.clear()
        # The embedders refer back to this object. Otherwise device memory would be freed at some
        # later garbage collection, and ComfyUI would unload other models in the meantime.
        self.bare.clear()
        self._embedders.clear()
        self._loaded.clear()
        self._scaled_layers.clear()

    def __getitem__(self, name: str) -> WanTransformer3DModel:
        model = self.bare[name]
        if name not in self._loaded:
            # The parameters outlive the run that first needs them, and an inference tensor could
            # not be changed later.
            with torch.inference_mode(False), torch.no_grad():
                set_parameters(model, self._load((name, None)))
                self._multiplications.prepare(self._scaled_layers[name])
                model.rope.to(self._device)
            parameters = PatchedParameters(model)
            parameters.set(self._resident_patches(name))
            self._loaded[name] = parameters
        self._compute_read_rows()
        return model

    def __iter__(self) -> Iterator[str]:
        return iter(self.bare)

    def __len__(self) -> int:
        return len(self.bare)

    @contextmanager
    def _with_embedder(self, name: str, part: EmbedderPart) -> Iterator[None]:
        """Context with an embedder part's weights on the device. Waits until they are read.

        Raises:
            OSError: reading failed. The next call reads the part again.
        """
        model = self.bare[name]
        weights = self._load((name, part))
        patches = self._selected_patches(name)
        # In place, because these weights were decoded for this context alone.
        for full in weights.keys() & patches.keys():
            write_sum(weights[full], patches[full], weights[full])
        meta_parameters = {full: model.get_parameter(full) for full in weights}
        set_parameters(model, weights)
        del weights  # otherwise leaving the context would not free the memory
        try:
            yield
        finally:
            set_parameters(model, meta_parameters)
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Start reading the next embedder, one expert at a time to limit the RAM."""
        for name, embedder in self._embedders.items():
            missing = embedder.missing_parts
            if missing:
                for kept in [
                    each for each in self._reads if each[1] in missing and each[0] != name
                ]:
                    self._reads.pop(kept).cancel()
                for part in missing:
                    self._start_reading((name, part))
                return
        if self.reads_for_next_run:
            for part in PARTS:
                self._start_reading((self._first, part))

    def _is_for_next_run(self, name: str) -> bool:
        return self.reads_for_next_run and name == self._first

    def _compute_read_rows(self) -> None:
        """Compute the next expert's rows if the weights were read.

        Runs between two steps, when a step's working memory is free.
        """
        for name, embedder in self._embedders.items():
            reads = [self._reads.get((name, part)) for part in embedder.missing_parts]
            if reads and all(read is not None and read.done() for read in reads):
                embedder.compute_expected()

    def _resident_patches(self, name: str) -> Mapping[str, WeightPatch]:
        patches = self._selected_patches(name).items()
        return {full: patch for full, patch in patches if embedder_part(full) is None}

    def _start_reading(self, part: Part) -> None:
        """Start reading a part unless reading has started."""
        if part not in self._reads:
            self._reads[part] = self._reader.submit(self._read, part)

    def _read(self, part: Part) -> Read:
        tensors = self._stored[part]
        scales = self._experts[part[0]].scales
        nbytes = sum(tensor.stored_bytes for tensor in tensors.values())
        if (available := insufficient_ram(nbytes)) is not None:
            raise InsufficientRamError(
                f"{nbytes / 1e9:.1f} GB of RAM for the parameters outside the blocks of the "
                f"{part[0]} expert, {available / 1e9:.1f} GB are available: keep fewer blocks in "
                "RAM, or close other programs"
            )
        stored = read_tensors(tensors)
        locked = None
        if self._runtime is not None and part[1] is not None:
            # Here, while steps compute: the device waits for embedder copies, and page-locked
            # memory makes them eight times as fast (H100).
            self._runtime.enter_thread()
            locked = LockedTensors(stored.values(), self._runtime)
        return (
            stored,
            read_scales({full: scales[full] for full in tensors if full in scales}),
            locked,
        )

    def _load(self, part: Part) -> Tensors:
        """Return the decoded parameters of a part on the device. Waits until they are read.

        Raises:
            OSError: reading failed. The next call reads the part again.
        """
        self._start_reading(part)
        read = self._reads.pop(part)
        if read.done() and read.exception() is not None:
            # An earlier read, before the part was needed, failed. The file may be back.
            read = self._reader.submit(self._read, part)
        stored, scales, locked = read.result()
        self.non_block_bytes += sum(tensor.stored_bytes for tensor in self._stored[part].values())
        if part[1] is None:
            parameters = {
                full: self._decoded(full, tensor, stored[full], scales.get(full))
                for full, tensor in self._stored[part].items()
            }
            return copy_together(parameters, self._device)
        parameters = {}
        try:
            # One by one, so that the device has both forms of only one large embedder tensor at
            # once.
            for full, tensor in self._stored[part].items():
                moved = locked.copy(stored[full]) if locked else stored[full].to(self._device)
                parameters[full] = self._decoded(full, tensor, moved, scales.get(full))
                del moved
            return parameters
        finally:  # the first copies are under way if memory runs out at a later one
            if locked is not None:
                # The device may read page-locked memory until its copies are done.
                clock = clock_for(self._device)
                clock.wait_for(clock.mark())
                # Not on this thread, because the next step waits on it.
                self._reader.submit(locked.release)

    def _decoded(
        self, full: str, tensor: FileTensor, stored: torch.Tensor, scale: torch.Tensor | None
    ) -> torch.Tensor:
        return decoded(tensor, stored, scale, parameter_dtype(full, self._compute_dtype))


def _model(
    config: WanConfig, compute_dtype: torch.dtype, settings: BlockSettings
) -> WanTransformer3DModel:
    """Return the model on meta in eval mode, with a `CachedEmbedder` and these block settings.

    The position tables (RoPE) are real tensors because no file contains them.
    """
    model = model_on_meta(config)
    model.condition_embedder = CachedEmbedder(model.condition_embedder, compute_dtype)
    replace_blocks(model, settings)
    # A copy for each model, because `.to(device)` moves a module's buffers in place.
    model.rope = copy.deepcopy(position_tables(config.patch_size, model.config.rope_max_seq_len))
    model.axis_tables = AxisTables()
    return model.eval().requires_grad_(False)


def _tensors(expert: Expert, part: EmbedderPart | None) -> dict[str, FileTensor]:
    streamed = streamed_parameters(expert.config)
    return {
        name: tensor
        for name, tensor in expert.weights.items()
        if name not in streamed and embedder_part(name) == part
    }
