"""Models of both experts, with all parameters that are not streamed.

Resident parameters are small, 16 MB per A14B expert: patch embedding, output projection, and the biases, norms and
modulation tables of the blocks. They are loaded when a model is looked up. The time and text embedders (0.5 GB per
expert) are loaded only while rows are computed, one expert at a time: see `embedder_cache.py`.
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
from ..checkpoint.meta_model import build_model, materialise, parameter_dtype, set_parameters
from ..checkpoint.open import Expert
from ..lora.apply import PatchedParameters
from ..transformer.block_kernels import BlockKernels
from .embedder_parts import PARTS, EmbedderPart, embedder_part
from .embedder_streaming import EmbedderWeights

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel

    from .embedders import CachedEmbedder

Tensors = dict[str, torch.Tensor]


class ExpertModels(Mapping[str, "WanTransformer3DModel"]):
    """Models by expert name; a look-up waits until the resident parameters of that model are loaded.

    A reader thread reads raw bytes, and the thread of the look-up decodes them. All look-ups must come from one thread.
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
        self._pending: dict[str, Future[tuple[Tensors, Tensors]]] = {}
        self._patches: Mapping[str, Mapping[str, WeightPatch]] = {}
        self._loaded: dict[str, PatchedParameters] = {}
        self._resident_bytes_read = 0
        self._embedders: dict[str, CachedEmbedder] = {n: m.condition_embedder for n, m in self._models.items()}
        self._embedder_weights = EmbedderWeights(
            experts, self._models, compute_dtype=compute_dtype, device=device, reader=self._reader
        )
        for name, embedder in self._embedders.items():
            embedder.set_weight_loader(partial(self._with_embedder, name))

    @property
    def blocks(self) -> dict[str, list[nn.Module]]:
        """Blocks of each model by expert name; does not wait for parameters."""
        return {name: list(model.blocks) for name, model in self._models.items()}

    @property
    def bare(self) -> Mapping[str, WanTransformer3DModel]:
        """Models by expert name, for installing hooks; does not wait for parameters."""
        return self._models

    @property
    def non_block_bytes(self) -> int:
        """Bytes read so far that are not streamed."""
        return self._resident_bytes_read + self._embedder_weights.bytes_read

    @property
    def host_bytes(self) -> int:
        """Bytes of RAM of embedder weights that were read and not used yet."""
        return self._embedder_weights.host_bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes of device memory of the loaded resident parameters and position tables."""
        models = [(name, self._models[name]) for name in self._loaded]
        parameters = [model.get_parameter(tensor) for name, model in models for tensor in self._resident[name]]
        tables = [table for _, model in models for table in model.rope.buffers()]
        return sum(tensor.nbytes for tensor in (*parameters, *tables))

    def set_patches(self, patches: Mapping[str, Mapping[str, WeightPatch]]) -> None:
        """Replace the patches of parameters that are not streamed, by expert and parameter name.

        Loaded models change at once, the others when they are looked up. Cached rows of changed embedders are
        invalidated, and their weights are read again; no other weights are.
        """
        for name, embedder in self._embedders.items():
            changed = {embedder_part(parameter) for parameter in (*self._patches.get(name, {}), *patches.get(name, {}))}
            for part in PARTS:
                if part in changed:
                    embedder.invalidate(part)
        self._patches = patches
        self._embedder_weights.set_patches(patches)
        for name, parameters in self._loaded.items():
            parameters.set(self._resident_patches(name))

    def prefetch_embeddings(
        self, timesteps: Mapping[str, Sequence[float]], texts: Mapping[str, Sequence[torch.Tensor]]
    ) -> None:
        """Set the timesteps and texts of the next run, by expert in the order of the run, and start reading weights.

        All rows of an expert are computed when the first one is needed. Those of the next expert are computed before
        the first step that finds their weights read. Rows of an earlier run are reused.
        """
        for name, embedder in self._embedders.items():
            if name in timesteps:
                embedder.set_expected(timesteps[name], texts[name])
            else:
                embedder.clear_expected()
            for part in PARTS:
                if part not in embedder.missing_parts:
                    self._embedder_weights.drop(name, part)
        self._read_ahead()

    def start_reading(self) -> None:
        """Start reading the resident parameters of both experts."""
        # The first run needs the embedder of the first expert before the parameters of the second expert.
        for at, name in enumerate(self._models):
            self._pending[name] = self._reader.submit(self._read, name)
            for part in PARTS if at == 0 else ():
                self._embedder_weights.start_reading(name, part)

    def close(self) -> None:
        """Cancel pending reads and join the thread. Closing twice is allowed."""
        self._reader.shutdown(cancel_futures=True)
        self._pending.clear()
        self._embedder_weights.close()

    def __getitem__(self, name: str) -> WanTransformer3DModel:
        model = self._models[name]
        if name in self._pending:
            try:
                weights, scales = self._pending[name].result()
            except OSError:
                self._pending[name] = self._reader.submit(self._read, name)  # retry for the next look-up
                raise
            self._complete(name, weights, scales)
            self._loaded[name] = PatchedParameters(model)
            self._loaded[name].set(self._resident_patches(name))
            self._resident_bytes_read += sum(tensor.nbytes for tensor in self._resident[name].values())
            del self._pending[name]
        self._compute_read_rows()
        return model

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @contextmanager
    def _with_embedder(self, name: str, part: EmbedderPart) -> Iterator[None]:
        with self._embedder_weights.loaded(name, part):
            yield
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Start reading the embedder that is needed next, of one expert at a time to limit the RAM."""
        for name, embedder in self._embedders.items():
            if embedder.missing_parts:
                for part in embedder.missing_parts:
                    self._embedder_weights.start_reading(name, part)
                return

    def _compute_read_rows(self) -> None:
        """Compute the rows of the next expert if its weights were read.

        Runs between two steps, when the working memory of a step is free.
        """
        for name, embedder in self._embedders.items():
            missing = embedder.missing_parts
            if missing and all(self._embedder_weights.is_read(name, part) for part in missing):
                embedder.compute_expected()

    def _resident_patches(self, name: str) -> Mapping[str, WeightPatch]:
        patches = self._patches.get(name, {})
        return {parameter: patches[parameter] for parameter in patches if embedder_part(parameter) is None}

    def _read(self, name: str) -> tuple[Tensors, Tensors]:
        return read_tensors(self._resident[name]), read_tensors(self._scales[name])

    def _complete(self, name: str, weights: Tensors, scales: Tensors) -> None:
        model, places = self._models[name], self._resident[name]
        # The parameters outlive the run that first needs them, and an inference tensor could not be changed later.
        with torch.inference_mode(False), torch.no_grad():
            decoded = {key: self._decode(key, places[key], weights[key], scales.get(key)) for key in weights}
            set_parameters(model, decoded)
            model.rope.to(self._device)

    def _decode(self, name: str, tensor: FileTensor, stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return materialise(
            stored,
            tensor.shape,
            parameter_dtype(name, self._compute_dtype),
            self._device,
            packing=tensor.packing,
            scale=None if scale is None else scale.reshape(()),
        )


def _resident_tensors(expert: Expert, model: WanTransformer3DModel) -> dict[str, FileTensor]:
    streamed = {f"blocks.{i}.{name}" for i, block in enumerate(model.blocks) for name in streamed_names(block)}
    return {
        name: tensor for name, tensor in expert.weights.items() if name not in streamed and embedder_part(name) is None
    }


def _scales_of(expert: Expert, tensors: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    return {name: scale for name, scale in expert.scales.items() if name in tensors}
