"""Both experts' models, and everything in them that does not stream.

What stays is small, 16 MB per A14B expert: the patch embedding and the projection at the end, and the blocks' own
biases, norms and tables. A model has that from the moment it is looked up. The weights that embed time and text, 0.5 GB
per expert, come for a moment, one expert's after the other's: see `embedder_cache.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...offload import FileTensor, WeightPatch, read_tensors, streamed_names
from ..checkpoint.meta_model import build_model, parameter_dtype, placed, set_parameters
from ..checkpoint.open import Expert
from ..lora.apply import PatchedParameters
from ..transformer.block_kernels import BlockKernels
from .embedder_cache import PARTS, EmbedderPart, part_of
from .embedder_streaming import EmbedderWeights

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel

    from .embedder_cache import CachedEmbedder

Tensors = dict[str, torch.Tensor]


class ExpertModels(Mapping[str, "WanTransformer3DModel"]):
    """The models by expert name; looking one up waits until everything in it is there that stays.

    A thread reads raw bytes; they are decoded by the thread that looks a model up. Look-ups come from one thread.
    """

    def __init__(self, experts: Mapping[str, Expert], *, compute_dtype: torch.dtype, device: torch.device) -> None:
        self._models = {name: build_model(expert.config, compute_dtype) for name, expert in experts.items()}
        timed = any(expert.config.family == "ti2v" for expert in experts.values())
        self.kernels = BlockKernels((block for model in self._models.values() for block in model.blocks), timed=timed)
        self._resident = {name: _resident_tensors(expert, self._models[name]) for name, expert in experts.items()}
        self._scales = {name: _scales_of(expert, self._resident[name]) for name, expert in experts.items()}
        self._compute_dtype = compute_dtype
        self._device = device
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wanstream-outer")
        self._coming: dict[str, Future[tuple[Tensors, Tensors]]] = {}
        self._patches: Mapping[str, Mapping[str, WeightPatch]] = {}
        self._complete_ones: dict[str, PatchedParameters] = {}
        self._staying_bytes_read = 0
        self._embedders: dict[str, CachedEmbedder] = {n: m.condition_embedder for n, m in self._models.items()}
        self._embedder_weights = EmbedderWeights(
            experts, self._models, compute_dtype=compute_dtype, device=device, reader=self._reader
        )
        for name, embedder in self._embedders.items():
            embedder.take_weights_from(partial(self._with_embedder, name))

    @property
    def blocks(self) -> dict[str, list[nn.Module]]:
        """The blocks of each model, complete or not; waits for nothing."""
        return {name: list(model.blocks) for name, model in self._models.items()}

    @property
    def bare(self) -> Mapping[str, WanTransformer3DModel]:
        """The models, complete or not, for hooks to be hung on; waits for nothing."""
        return self._models

    @property
    def non_block_bytes(self) -> int:
        """Bytes read so far that do not stream."""
        return self._staying_bytes_read + self._embedder_weights.bytes_read

    @property
    def host_bytes(self) -> int:
        """Bytes of RAM that embedders' weights take which were read and not used yet."""
        return self._embedder_weights.host_bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes of device memory of the parameters that are there and stay, and of the position tables."""
        models = [(name, self._models[name]) for name in self._complete_ones]
        parameters = [model.get_parameter(tensor) for name, model in models for tensor in self._resident[name]]
        tables = [table for _, model in models for table in model.rope.buffers()]
        return sum(tensor.nbytes for tensor in (*parameters, *tables))

    def set_patches(self, patches: Mapping[str, Mapping[str, WeightPatch]]) -> None:
        """Replace what is added to the parameters that do not stream, by expert and parameter name.

        Models that are complete change at once, the others when they are looked up. What embedders computed with other
        weights is computed anew, and they are read for that; nothing else is read again.
        """
        for name, embedder in self._embedders.items():
            changed = {part_of(parameter) for parameter in (*self._patches.get(name, {}), *patches.get(name, {}))}
            for part in PARTS:
                if part in changed:
                    embedder.forget(part)
        self._patches = patches
        self._embedder_weights.set_patches(patches)
        for name, parameters in self._complete_ones.items():
            parameters.set(self._staying_patches(name))

    def expect(self, timesteps: Mapping[str, Sequence[float]], texts: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Say what the coming run will ask of which expert, in the order of its experts.

        All of it is computed when the first of it is asked for, and that of the next expert before a step when its
        weights have been read; what an earlier run has computed is used again.
        """
        for name, embedder in self._embedders.items():
            if name in timesteps:
                embedder.expect(timesteps[name], texts[name])
            else:
                embedder.expect_nothing()
            for part in PARTS:
                if part not in embedder.missing:
                    self._embedder_weights.drop(name, part)
        self._read_ahead()

    def start_reading(self) -> None:
        """Begin to read what stays of both experts, and between them the embedder of the first."""
        for at, name in enumerate(self._models):
            self._coming[name] = self._reader.submit(self._read, name)
            for part in PARTS if at == 0 else ():
                self._embedder_weights.start(name, part)

    def close(self) -> None:
        """Drop what has not been read yet and join the thread. Closing twice is allowed."""
        self._reader.shutdown(cancel_futures=True)
        self._coming.clear()
        self._embedder_weights.close()

    def __getitem__(self, name: str) -> WanTransformer3DModel:
        model = self._models[name]
        if name in self._coming:
            try:
                weights, scales = self._coming[name].result()
            except OSError:
                self._coming[name] = self._reader.submit(self._read, name)  # for the next look-up
                raise
            self._complete(name, weights, scales)
            self._complete_ones[name] = PatchedParameters(model)
            self._complete_ones[name].set(self._staying_patches(name))
            self._staying_bytes_read += sum(tensor.nbytes for tensor in self._resident[name].values())
            del self._coming[name]
        self._project_what_arrived()
        return model

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @contextmanager
    def _with_embedder(self, name: str, part: EmbedderPart) -> Iterator[None]:
        with self._embedder_weights.there(name, part):
            yield
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Begin to read the embedder that is needed next, of one expert at a time."""
        for name, embedder in self._embedders.items():
            if embedder.missing:
                for part in embedder.missing:
                    self._embedder_weights.start(name, part)
                return

    def _project_what_arrived(self) -> None:
        """Between two steps, when nothing else takes the device's memory: the next expert's rows."""
        for name, embedder in self._embedders.items():
            missing = embedder.missing
            if missing and all(self._embedder_weights.arrived(name, part) for part in missing):
                embedder.project_expected()

    def _staying_patches(self, name: str) -> Mapping[str, WeightPatch]:
        patches = self._patches.get(name, {})
        return {parameter: patches[parameter] for parameter in patches if part_of(parameter) is None}

    def _read(self, name: str) -> tuple[Tensors, Tensors]:
        return read_tensors(self._resident[name]), read_tensors(self._scales[name])

    def _complete(self, name: str, weights: Tensors, scales: Tensors) -> None:
        model, places = self._models[name], self._resident[name]
        # The parameters outlive the run that first needs them, so they must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            decoded = {key: self._decode(key, places[key], weights[key], scales.get(key)) for key in weights}
            set_parameters(model, decoded)
            model.rope.to(self._device)

    def _decode(self, name: str, tensor: FileTensor, stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return placed(
            stored,
            tensor.shape,
            parameter_dtype(name, self._compute_dtype),
            self._device,
            packing=tensor.packing,
            scale=None if scale is None else scale.reshape(()),
        )


def _resident_tensors(expert: Expert, model: WanTransformer3DModel) -> dict[str, FileTensor]:
    streamed = {f"blocks.{i}.{name}" for i, block in enumerate(model.blocks) for name in streamed_names(block)}
    return {name: tensor for name, tensor in expert.weights.items() if name not in streamed and part_of(name) is None}


def _scales_of(expert: Expert, tensors: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    return {name: scale for name, scale in expert.scales.items() if name in tensors}
