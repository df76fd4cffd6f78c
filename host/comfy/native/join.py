"""Two experts as one MODEL. The noise level in a model call selects the expert.

Their blocks are two stacks in one engine. The MODEL has the class, keys and layers of the
high-noise expert, so nodes patch both experts by patching one. The modules are copies that share
tensors with the joined MODELs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import comfy.model_sampling
import torch
from torch import nn

from ...api import Host
from .. import versions
from .load import WRAPPERS, native_patcher
from .runs.lanes import KEY
from .streamed.joined_model import HIGH, LOW, ExpertsJoinError, JoinedModel
from .streamed.model import outside_bytes, stream_weights
from .streamed.patcher import NativePatcher
from .streamed.weights import NativeWeights
from .twins import BoundElsewhereError, rebound, twin_of

IN_A_CALL = (WRAPPERS.CALC_COND_BATCH, WRAPPERS.APPLY_MODEL, WRAPPERS.DIFFUSION_MODEL)
"""Wrapper kinds inside a model call. One expert alone may have these."""

T = TypeVar("T")


class JoinedPatcher(NativePatcher):
    """MODEL with two experts.

    Patches on it apply to both. `own` has the patches for one expert alone.
    """

    experts: Mapping[str, NativePatcher]
    """The joined MODELs."""
    own: Mapping[str, NativePatcher]
    """Patcher for each expert here, with the expert's own patches."""
    boundary: float
    cloned: ClassVar[Sequence[str]] = (*NativePatcher.cloned, "experts", "own", "boundary")

    def parts(self) -> Mapping[str, NativePatcher]:
        """Return the patcher for each expert, with own and shared patches."""
        if versions.is_compiled_by_wrapper(self) or any(self.injections.values()):
            raise ExpertsJoinError(
                "a node behind Join Experts (torch.compile or a LoRA in bypass mode) holds the "
                "layers of one expert: use Load LoRA, and leave out the compilation"
            )
        return {name: self._part(name) for name in self.own}

    def get_model_object(self, name: str) -> Any:
        """Return the attribute patched for both, else that of the high-noise expert."""
        if name in self.object_patches:
            return self.object_patches[name]
        return self.own[HIGH].get_model_object(name)

    def pre_run(self) -> None:
        for own in self.own.values():
            own.pre_run()
        # Last, because `own[HIGH]` makes itself the current patcher of the same model.
        super().pre_run()
        # Clones share the model and may have different boundaries.
        self.model.boundary = self.boundary

    def cleanup(self) -> None:
        super().cleanup()
        for own in self.own.values():
            own.cleanup()

    def model_patches_to(self, device: torch.device) -> None:
        super().model_patches_to(device)
        for own in self.own.values():
            own.model_patches_to(device)

    def model_patches_models(self) -> list[Any]:
        models = list(super().model_patches_models())
        return models + [each for own in self.own.values() for each in own.model_patches_models()]

    def unpatch_model(
        self, device_to: torch.device | None = None, unpatch_weights: bool = True
    ) -> None:
        for own in self.own.values():
            # Loading patches clones of `own`, and clones share their backups. This MODEL patches
            # nothing.
            own.unpatch_model(device_to, unpatch_weights)

    def models(self) -> list[Any]:
        return [own.model for own in self.own.values()]

    def add_hook_patches(self, *_: Any, **__: Any) -> Any:
        raise ExpertsJoinError(
            "a hook changes weights for some of the conditions, which Join Experts does not apply: "
            "use Load LoRA for the whole run"
        )

    def get_key_patches(self, filter_prefix: str | None = None) -> dict[str, Any]:
        raise self._of_one("merged")

    def state_dict_for_saving(self, *args: Any, **settings: Any) -> dict[str, torch.Tensor]:
        raise self._of_one("saved")

    def split(self) -> dict[str, NativePatcher]:
        """Return the MODEL for each expert, with the shared patches.

        Raises ExpertsJoinError if a patch holds one expert's layers.
        """
        return {name: self._split(name) for name in self.experts}

    def options_of(self, expert: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model options for a call, including the expert's."""
        own = self.own[expert]
        wrappers = {kind: own.wrappers.get(kind, {}) for kind in IN_A_CALL}
        return _merged(
            _merged(own.model_options, {versions.IN_LAYERS: {versions.WRAPPERS: wrappers}}), options
        )

    def _part(self, name: str) -> NativePatcher:
        part: NativePatcher = self.own[name].clone()
        self._add_to(part)
        # Equal while nothing changes, so ComfyUI loads nothing again.
        versions.join_patch_identities(part, self.own[name], self)
        return part

    def _split(self, name: str) -> NativePatcher:
        expert: NativePatcher = self.experts[name].clone()
        self._add_to(expert)
        expert.model_options = _merged(expert.model_options, self.model_options)
        for kind, wrappers in self.wrappers.items():
            for key, functions in wrappers.items():
                # The expert has our wrappers already.
                if key != KEY:
                    for function in functions:
                        expert.add_wrapper_with_key(kind, key, function)
        for kind, callbacks in self.callbacks.items():
            for key, functions in callbacks.items():
                for function in functions:
                    expert.add_callback_with_key(kind, key, function)
        for key, models in self.additional_models.items():
            expert.set_additional_models(key, models)
        # Without shared patches, the expert keeps the identity, and ComfyUI loads nothing again.
        if versions.has_patched_weights(self):
            versions.join_patch_identities(expert, expert, self)
        return expert.with_settings(self.streaming)

    def _add_to(self, target: NativePatcher) -> None:
        """Add the shared patches: weights, layers and attributes."""
        versions.add_patches_of_weights(self, target)
        try:
            target.object_patches |= rebound(self.object_patches, self.own[HIGH], target)
        except BoundElsewhereError as err:
            raise ExpertsJoinError(
                f"a node behind Join Experts has replaced {err} by a module that holds the layers "
                "of one expert: leave that node out, or use two samplers without Join Experts"
            ) from err
        target.force_cast_weights |= self.force_cast_weights

    def _of_one(self, done: str) -> ExpertsJoinError:
        return ExpertsJoinError(
            f"two experts cannot be {done} as one: connect an output of Split Experts"
        )


class ExpertJoiner:
    """Joins MODELs. Two models joined again share one set of buffers.

    Args:
        host: host of the runs.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._joined: weakref.WeakKeyDictionary[
            nn.Module, weakref.WeakKeyDictionary[nn.Module, weakref.ref[JoinedPatcher]]
        ] = weakref.WeakKeyDictionary()

    def join(self, high: Any, low: Any, boundary: float) -> JoinedPatcher:
        """Return one MODEL for a high-noise and a low-noise expert.

        Args:
            high, low: MODELs whose blocks stream, with or without own patches.
            boundary: see `split_at_boundary`.

        Raises:
            ExpertsJoinError: the boundary is outside 0..1, a MODEL does not stream, the families or
                sizes differ, or one MODEL has something that only both can have.
        """
        experts = {HIGH: high, LOW: low}
        _check(experts, boundary)
        of_high = self._joined.setdefault(high.model, weakref.WeakKeyDictionary())
        # The default returns None, like a dead reference.
        root = of_high.get(low.model, lambda: None)()
        if root is None:
            root = _first(experts, self._host)
            # A weak reference, because the MODEL holds both models, which are the keys here.
            of_high[low.model] = weakref.ref(root)
        # Each clone keeps `root` alive, because ComfyUI sets `parent` on clones.
        joined: JoinedPatcher = root.clone()
        joined.experts = experts
        joined.own = {name: _own(experts[name], root.own[name]) for name in experts}
        joined.boundary = boundary
        joined.with_settings(high.streaming)
        return joined


def split(model: object) -> dict[str, NativePatcher]:
    """Return the two experts in a joined MODEL.

    Raises ExpertsJoinError for any other MODEL.
    """
    if not isinstance(model, JoinedPatcher):
        raise ExpertsJoinError("this MODEL has one expert: connect the output of Join Experts")
    return model.split()


def predict_noise(
    executor: Any,
    x: torch.Tensor,
    timestep: torch.Tensor,
    model_options: Mapping[str, Any] = {},
    seed: int | None = None,
) -> torch.Tensor:
    """Wrapper around one ComfyUI prediction. Adds the expert's options."""
    patcher: JoinedPatcher = executor.class_obj.model_patcher
    options = patcher.options_of(patcher.model.expert(timestep), model_options)
    predicted: torch.Tensor = executor(x, timestep, options, seed)
    return predicted


def _first(experts: Mapping[str, NativePatcher], host: Host) -> JoinedPatcher:
    """Return the first MODEL for two models, without patches."""
    twins: dict[str, Any] = {}
    for name, expert in experts.items():
        if expert.weights.running:
            raise ExpertsJoinError(f"the {name}-noise MODEL runs now: join it after its sampler")
        expert.detach()  # restores the loaded layers, which are copied next
        model = expert.model
        shared = (*model.stored.values(), model.weights, model.memory, model.runs)
        twins[name] = twin_of(model, shared=shared)
    high = twins[HIGH]
    low = twins[LOW]
    weights = NativeWeights.joined(
        {name: expert.weights for name, expert in experts.items()},
        {
            name: {
                path: twin.diffusion_model.get_submodule(path)
                for path in experts[name].weights.blocks
            }
            for name, twin in twins.items()
        },
        outside_bytes=sum(map(outside_bytes, twins.values())),
        device=experts[HIGH].load_device,
    )
    stream_weights(high, weights, f"{type(high).__name__}, two experts")
    JoinedModel.join(high, low)
    root = native_patcher(high, experts[HIGH].streaming, host, JoinedPatcher)
    assert isinstance(root, JoinedPatcher)
    root.add_wrapper_with_key(WRAPPERS.PREDICT_NOISE, KEY, predict_noise)
    # Each patcher in `own` reads these from the model it patches.
    for name in ("weights", "memory", "runs"):
        setattr(low, name, getattr(high, name))
    root.experts = experts
    root.own = {
        name: NativePatcher(twin, root.load_device, root.offload_device)
        for name, twin in twins.items()
    }
    root.boundary = 0.0
    return root


def _own(expert: NativePatcher, bare: NativePatcher) -> NativePatcher:
    """Return a clone of `bare` with everything `expert` has except weights."""
    carrier: NativePatcher = bare.clone()
    versions.carry_over(expert, carrier)
    # `carry_over` shares lists and dictionaries with `expert`. This second clone copies them.
    own: NativePatcher = carrier.clone()
    try:
        own.object_patches = rebound(own.object_patches, expert, own)
    except BoundElsewhereError as err:
        raise ExpertsJoinError(
            f"a node in front of Join Experts has replaced {err} by a module that holds the "
            "expert's layers: leave that node out, or use two samplers without Join Experts"
        ) from err
    for wrappers in own.wrappers.values():
        # The joined MODEL has our wrappers, once for both experts.
        wrappers.pop(KEY, None)
    return own


def _check(experts: Mapping[str, Any], boundary: float) -> None:
    if not 0 <= boundary <= 1:  # also for NaN
        raise ExpertsJoinError(
            f"the boundary is {boundary:g}: give 0 to 1 (Wan2.2: 0.875 for text, 0.9 for images)"
        )
    for name, expert in experts.items():
        if not isinstance(expert, NativePatcher) or isinstance(expert, JoinedPatcher):
            kind = "is joined already" if isinstance(expert, JoinedPatcher) else "does not stream"
            raise ExpertsJoinError(
                f"the {name}-noise MODEL {kind}: connect Load Diffusion Model (streamed), or "
                "Stream Model behind another loader"
            )
        if not isinstance(expert.get_model_object("model_sampling"), comfy.model_sampling.CONST):
            raise ExpertsJoinError(
                f"the noise levels of the {name}-noise MODEL ({type(expert.model).__name__}) are "
                "not those of a rectified flow, from 0 to 1, as two experts have them"
            )
        for what in _of_both(expert):
            raise ExpertsJoinError(
                f"the {name}-noise MODEL has {what}, which only both experts can have: put that "
                "node behind Join Experts"
            )
    high = experts[HIGH]
    low = experts[LOW]
    differences = list(_differences(high.model, low.model))
    if differences:
        shown = ", ".join(f"{what} is {one} and {other}" for what, one, other in differences[:4])
        raise ExpertsJoinError(
            f"these are not two experts of one model: {shown} (high-noise and low-noise MODEL)"
        )
    if high.streaming != low.streaming:
        raise ExpertsJoinError(
            "the two MODELs have different policies or share_visits, and share one set of buffers: "
            "connect the same policy to both loaders"
        )


def _of_both(expert: NativePatcher) -> Iterator[str]:
    """Yield anything one expert cannot have alone, in words."""
    for kind, wrappers in expert.wrappers.items():
        names = [str(key) for key, functions in wrappers.items() if functions and key != KEY]
        if names and kind not in IN_A_CALL:
            yield f"the {kind} wrapper {names[0]}"
    if versions.is_compiled_by_wrapper(expert):
        yield "compiled layers"
    for word, kinds in (("callback", expert.callbacks), ("injection", {"": expert.injections})):
        for kind, entries in kinds.items():
            yield from (f"the {kind} {word} {key}" for key, found in entries.items() if found)
    if any(expert.additional_models.values()):
        yield "additional models"
    if expert.hook_patches:
        yield "hooks with weights"


def _differences(high: Any, low: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name and both values for each difference between two models."""
    yield from _unequal("the class", type(high).__name__, type(low).__name__)
    latents = (type(each.latent_format).__name__ for each in (high, low))
    yield from _unequal("the latent format", *latents)
    of_high, of_low = (versions.architecture(each) for each in (high, low))
    for name in of_high | of_low:
        yield from _unequal(name, of_high.get(name), of_low.get(name))
    yield from _unequal("the number of blocks", *(len(each.weights.blocks) for each in (high, low)))


def _unequal(name: str, high: T, low: T) -> Iterator[tuple[str, T, T]]:
    if high != low:
        yield name, high, low


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings: lists are concatenated, other values come from the second."""
    merged = dict(first)
    for key, value in second.items():
        before = merged.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[key] = _merged(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            merged[key] = [*before, *value]
        else:
            merged[key] = value
    return merged
