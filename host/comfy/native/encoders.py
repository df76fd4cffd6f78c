"""ComfyUI's CLIP with text encoders whose blocks stream from their files."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import comfy.sd
import folder_paths
import torch
from torch import nn

from ....offload.formats import CheckpointFileError
from ....offload.sources import StoredFile, StoredTensor
from ....schema import SMALLEST_BLOCK, OffloadPolicy
from ...native_models import EncoderFiles, ModelStreaming
from .. import versions
from .network.block_lists import NotStreamedError
from .network.entries import Dtypes, entries, parameters
from .network.layers import is_joined, refer_to_tensors
from .runs.encoder_run import EncoderRuns, followed
from .streamed.model import CHECKPOINT_LOADER, stream_from_files
from .streamed.patcher import NativePatcher

Loaded = tuple[Sequence[str], Sequence[str]]
"""Keys missing in a state dict, and keys missing in a network."""

NOT_THE_LOAD_DEVICE = torch.device("cpu", 0)
"""The CPU, for networks whose tensors will refer to files.

The index makes it differ from any load device: ComfyUI would otherwise load the whole network at
once.
"""


LOADERS = ("Load CLIP", "Load CLIP (Dual)", "Load CLIP (Triple)", "Load CLIP (Quadruple)")
"""ComfyUI's nodes for one to four files of text encoders."""


class EncoderPatcher(NativePatcher):
    """Patcher of text encoders."""


def load_encoders(
    files: EncoderFiles,
    policy: OffloadPolicy,
    limits: Mapping[str, int],
    options: Mapping[str, Any] | None = None,
) -> comfy.sd.CLIP:
    """Return ComfyUI's CLIP for text encoder files, with streamed blocks.

    Args:
        files: the files and how ComfyUI loads them.
        policy: block policy.
        limits: `smallest_block` and `smallest_model`, as for `blocks_to_stream`.
        options: additional ComfyUI model options.

    Raises:
        CheckpointFileError: a file cannot be read or does not fit the encoder, or the encoders
            have too little in their blocks.
        ValueError: the policy does not fit the number of blocks.
    """
    stored = [_open(path) for path in files.paths]
    # Copied mappings, because ComfyUI renames keys in place.
    tensors = [
        versions.with_marked_layers(dict(each.tensors), dict(each.metadata))[0] for each in stored
    ]
    model_options = {**(options or {}), "initial_device": NOT_THE_LOAD_DEVICE}
    if files.on_cpu:
        cpu = torch.device("cpu")
        model_options |= {"load_device": cpu, "offload_device": cpu}
    # ComfyUI's own loaders have the same fallback.
    kind = getattr(comfy.sd.CLIPType, files.kind.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION)

    def load() -> comfy.sd.CLIP:
        clip = comfy.sd.load_text_encoder_state_dicts(
            tensors,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            clip_type=kind,
            model_options=model_options,
        )
        _check_used(stored, clip.cond_stage_model)
        return clip

    try:
        clip = _streamed(load, stored, policy, limits, loader=LOADERS[len(stored) - 1])
    except NotStreamedError as err:
        raise CheckpointFileError(files.paths[0], str(err)) from err
    assert clip is not None, "ComfyUI returns a CLIP for any files"
    versions.set_loader(clip.patcher, _patcher_of, (files, policy, limits, options))
    return clip


def stream_clip(clip: Any, policy: OffloadPolicy, limits: Mapping[str, int]) -> comfy.sd.CLIP:
    """Return a CLIP like `clip`, with all patches, whose blocks stream from the same files.

    Raises:
        ValueError: the files are unknown or too small.
        OSError: a file cannot be read.
    """
    streamed = clip
    if not isinstance(clip.patcher, EncoderPatcher):
        streamed = _opened_again(clip, policy, limits)
        versions.carry_over(clip.patcher, streamed.patcher)
        for name in versions.OF_A_CLIP & vars(clip).keys():
            setattr(streamed, name, getattr(clip, name))
    streamed = streamed.clone()  # `clip` keeps separate patches
    streamed.patcher.with_settings(ModelStreaming(policy=policy))
    return streamed


def _opened_again(clip: Any, policy: OffloadPolicy, limits: Mapping[str, int]) -> comfy.sd.CLIP:
    loaded = versions.loaded_clip(clip.patcher)
    if loaded is None:
        raise ValueError(
            "the files of this CLIP are not known to this ComfyUI: load them with Load CLIP "
            "(streamed)"
        )
    paths = tuple(map(Path, loaded.paths))
    if loaded.kind is not None:
        files = EncoderFiles(paths=paths, kind=loaded.kind)
        return load_encoders(files, policy, limits, loaded.options)
    streamed = checkpoint_clip(_open(paths[0]), limits)
    if streamed is None:
        raise ValueError(
            f"the text encoder in {paths[0].name} is too small to be worth streaming: use it as it "
            "is, without Stream CLIP"
        )
    return streamed


def checkpoint_clip(file: StoredFile, limits: Mapping[str, int]) -> comfy.sd.CLIP | None:
    """Return the CLIP in a checkpoint. The blocks stream from disk and are not kept.

    Return None for a file without a CLIP or with too little in the blocks.
    """

    def load() -> comfy.sd.CLIP | None:
        _, clip, _, _ = comfy.sd.load_state_dict_guess_config(
            dict(file.tensors),
            output_vae=False,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            output_model=False,
            te_model_options={"initial_device": NOT_THE_LOAD_DEVICE},
            metadata=dict(file.metadata),
        )
        return clip

    try:
        clip = _streamed(load, [file], OffloadPolicy.layerwise(), limits, loader=CHECKPOINT_LOADER)
    except NotStreamedError:
        return None
    if clip is not None:
        versions.set_loader(clip.patcher, _patcher_of_checkpoint, (file.path, limits))
    return clip


def _patcher_of_checkpoint(path: Path, limits: Mapping[str, int], **_: Any) -> NativePatcher:
    clip = checkpoint_clip(StoredFile(path), limits)
    assert clip is not None, "the file had a CLIP"
    patcher: NativePatcher = clip.patcher
    return patcher


def _patcher_of(*arguments: Any, **_: Any) -> NativePatcher:
    patcher: NativePatcher = load_encoders(*arguments).patcher
    return patcher


def check_encoder(path: Path) -> None:
    """Raise the errors that `load_encoders` finds in a file header."""
    _open(path)


def _open(path: Path) -> StoredFile:
    file = StoredFile(path)
    if file.is_packed:
        raise CheckpointFileError(
            path, "is a GGUF, which ComfyUI reads for no text encoder: use the safetensors version"
        )
    return file


def _streamed(
    load: Callable[[], comfy.sd.CLIP | None],
    files: Sequence[StoredFile],
    policy: OffloadPolicy,
    limits: Mapping[str, int],
    *,
    loader: str,
) -> comfy.sd.CLIP | None:
    """Return the CLIP built by `load` from state dicts referring to `files`, with streamed blocks.

    Raises NotStreamedError and the errors of `load_encoders`.
    """
    dtypes: dict[tuple[int, str], torch.dtype] = {}

    def refer(clip: Any, load_sd: Callable[..., Loaded], *args: Any, **settings: Any) -> Loaded:
        network = clip.cond_stage_model
        # With the first of several files, before any tensor has its stored dtype.
        if not dtypes:
            dtypes.update(_dtypes(network))
            refer_to_tensors(network, versions.encoder_linear_layers(network))
        # In dynamic VRAM, ComfyUI converts all tensors to the network's dtypes on use.
        changeable = {} if versions.is_dynamic(clip.patcher) else dtypes
        with _assigning(network, changeable):
            try:
                return load_sd(clip, *args, **settings)
            except RuntimeError as err:  # torch's error for different shapes
                raise CheckpointFileError(
                    _path_of(args[0]), f"does not fit {type(network).__name__}: {err}"
                ) from err

    with versions.loading_clip_by(refer):
        clip = load()
    if clip is None:
        return None
    network = clip.cond_stage_model
    linear = versions.encoder_linear_layers(network)
    kept = (nn.Embedding, *linear)
    # First, because `stream_from_files` leaves absent weights in RAM unless they are on `meta`.
    _drop_absent(network, kept, files)
    stream_from_files(
        network,
        files,
        network="",
        dtypes=dtypes,
        linear=linear,
        device=clip.patcher.load_device,
        loader=loader,
        kept=kept,
        limits=limits,
    )
    network.runs = EncoderRuns(network.weights)
    weakref.finalize(network, network.runs.detach).atexit = False  # hooks keep the blocks alive
    # The CLIP already holds this object, so only the class can be exchanged.
    network.__class__ = followed(type(network))
    clip.patcher = _patcher(clip.patcher, policy)
    return clip


def _check_used(files: Sequence[StoredFile], network: nn.Module) -> None:
    """Raise CheckpointFileError for a file without any tensor in the network.

    ComfyUI only logs missing tensors and then computes with random values.
    """
    for file in files:
        if not any(file.has(entry.tensor) for entry in entries(network)):
            raise CheckpointFileError(
                file.path,
                f"has no weights of the text encoders that ComfyUI detects "
                f"({type(network).__name__}): choose another file or type",
            )


def _drop_absent(
    network: nn.Module, kinds: tuple[type[nn.Module], ...], files: Sequence[StoredFile]
) -> None:
    """Free large weights that no file has, such as a missing vision part.

    Their modules raise CheckpointFileError when called.
    """
    for name, module in network.named_modules():
        if not isinstance(module, kinds):
            continue
        for entry in parameters(module):
            is_large = entry.tensor.nbytes >= SMALLEST_BLOCK and not is_joined(entry.tensor)
            if is_large and not any(file.has(entry.tensor) for file in files):
                entry.replace(torch.empty_like(entry.tensor, device="meta"))
                refuse = partial(_refuse_absent, files, f"{name}.{entry.name}")
                module.register_forward_pre_hook(refuse)


def _refuse_absent(
    files: Sequence[StoredFile], weight: str, _module: nn.Module, _inputs: object
) -> None:
    others = "".join(f" (nor has {each.path.name})" for each in files[:-1])
    raise CheckpointFileError(
        files[-1].path,
        f"has no {weight}{others}, which this prompt needs: choose a file of the whole encoder, or "
        "leave out the images if there are any",
    )


def _patcher(own: Any, policy: OffloadPolicy) -> NativePatcher:
    """Return a patcher for the same network, with everything ComfyUI has set on the first one."""
    patcher = EncoderPatcher(own.model, own.load_device, own.offload_device)
    versions.carry_over(own, patcher)
    return patcher.with_settings(ModelStreaming(policy=policy))


def _dtypes(network: nn.Module) -> Dtypes:
    return {
        entry.place: versions.intended_dtype(entry.module, entry.name, entry.tensor)
        for entry in entries(network)
    }


@contextmanager
def _assigning(network: nn.Module, dtypes: dict[tuple[int, str], torch.dtype]) -> Iterator[None]:
    """Make the modules in a network refer to the tensors they load.

    Remove tensors from `dtypes` that an encoder loads in the dtypes of the file.
    """
    with ExitStack() as replaced:
        for module in network.modules():
            assign = partial(_assign, module, module.load_state_dict, dtypes)
            replaced.enter_context(versions.loading_by(module, assign))
        yield


def _assign(
    module: nn.Module,
    load: Callable[..., Any],
    dtypes: dict[tuple[int, str], torch.dtype],
    tensors: Mapping[str, torch.Tensor],
    strict: bool = True,
    assign: bool = False,
) -> Any:
    if assign:
        for entry in entries(module):
            dtypes.pop(entry.place, None)
    # Without `assign`, torch would copy the values and so read the whole file.
    return load(tensors, strict=strict, assign=True)


def _path_of(tensors: Mapping[str, torch.Tensor]) -> Path:
    return next(each.place.path for each in tensors.values() if isinstance(each, StoredTensor))
