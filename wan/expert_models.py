"""Both experts' models, and everything in them that does not stream.

What does not stream is 0.5 GB per A14B expert: the embedders and the projection outside the blocks, and the blocks' own
biases, norms and tables. The high-noise expert's is read at once, the low-noise expert's behind it; a model is complete
from the moment it is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from diffusers import WanTransformer3DModel
from torch import nn

from ..offload.decode import decode_tensor
from ..offload.file_source import read_tensors
from ..offload.layout import streamed_names
from ..offload.patches import WeightPatch
from ..offload.safetensors_header import FileTensor
from .checkpoint import Expert
from .lora_patches import PatchedParameters
from .meta_model import build_model, parameter_dtype, set_parameters

Tensors = dict[str, torch.Tensor]


class ExpertModels(Mapping[str, WanTransformer3DModel]):
    """The models by expert name; looking one up waits until everything in it is there that does not stream.

    A thread reads raw bytes; they are decoded by the thread that looks a model up. Look-ups come from one thread.
    """

    def __init__(self, experts: Mapping[str, Expert], *, compute_dtype: torch.dtype, device: torch.device) -> None:
        self._models = {name: build_model(expert.config) for name, expert in experts.items()}
        self._resident = {name: _resident_tensors(expert, self._models[name]) for name, expert in experts.items()}
        self._scales = {name: _scales_of(expert, self._resident[name]) for name, expert in experts.items()}
        self._compute_dtype = compute_dtype
        self._device = device
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wanstream-outer")
        self._coming: dict[str, Future[tuple[Tensors, Tensors]]] = {}
        self._patches: Mapping[str, Mapping[str, WeightPatch]] = {}
        self._complete_ones: dict[str, PatchedParameters] = {}
        self.outer_bytes = 0  # bytes read so far

    @property
    def blocks(self) -> dict[str, list[nn.Module]]:
        """The blocks of each model, complete or not; waits for nothing."""
        return {name: list(model.blocks) for name, model in self._models.items()}

    @property
    def loaded_bytes(self) -> int:
        """Bytes of device memory of the parameters that are there and do not stream, and of the position tables."""
        models = [(name, self._models[name]) for name in self._complete_ones]
        parameters = [model.get_parameter(tensor) for name, model in models for tensor in self._resident[name]]
        tables = [table for _, model in models for table in model.rope.buffers()]
        return sum(tensor.nbytes for tensor in (*parameters, *tables))

    def set_patches(self, patches: Mapping[str, Mapping[str, WeightPatch]]) -> None:
        """Replace what is added to the parameters that do not stream, by expert and parameter name.

        Models that are complete change at once, the others when they are looked up; nothing is read again.
        """
        self._patches = patches
        for name, parameters in self._complete_ones.items():
            parameters.set(patches.get(name, {}))

    def start_reading(self) -> None:
        """Begin to read, the first expert first."""
        self._coming = {name: self._reader.submit(self._read, name) for name in self._models}

    def close(self) -> None:
        """Drop what has not been read yet and join the thread. Closing twice is allowed."""
        self._reader.shutdown(cancel_futures=True)
        self._coming.clear()

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
            self._complete_ones[name].set(self._patches.get(name, {}))
            self.outer_bytes += sum(tensor.nbytes for tensor in self._resident[name].values())
            del self._coming[name]
        return model

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

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
        there, dtype = stored.to(self._device), parameter_dtype(name, self._compute_dtype)
        if tensor.packing is None and scale is None:
            return there.to(dtype)
        decoded = torch.empty(tensor.shape, dtype=dtype, device=self._device)
        decode_tensor(there, decoded, packing=tensor.packing, scale=None if scale is None else scale.reshape(()))
        return decoded


def _resident_tensors(expert: Expert, model: WanTransformer3DModel) -> dict[str, FileTensor]:
    streamed = {f"blocks.{i}.{name}" for i, block in enumerate(model.blocks) for name in streamed_names(block)}
    return {name: tensor for name, tensor in expert.weights.items() if name not in streamed}


def _scales_of(expert: Expert, tensors: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    return {name: scale for name, scale in expert.scales.items() if name in tensors}
