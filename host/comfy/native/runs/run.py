"""Runs of a streamed native model by ComfyUI's samplers: blocks are fetched ahead of use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias, TypeVar

import comfy.model_base
import comfy.model_management
import torch

from .....devices import forget, total_bytes
from .....offload import AbsentWeightError, Lockstep, StackCalls, StreamSession
from ....api import Host, telemetry_options
from ....distilled_models import cfg_notices, node_with_cfg
from ....events import Events
from ....run_events import NOTICES_EVENT, SHORT_DTYPES, RunSettings, policy_words
from ... import versions
from ...samplers import predicted_sigmas
from ...shown_run import ShownRun
from ..streamed.joined_model import JoinedModel
from ..streamed.patcher import NativePatcher
from ..streamed.weights import STACK
from .hooks import NativeRuns
from .lanes import Conditions, ModelCall
from .policy import NativePolicy

Predictions: TypeAlias = list[torch.Tensor]
"""One prediction per condition in a model call. Uncomputed conditions have zeros."""

Result = TypeVar("Result")

logger = logging.getLogger("wanstream.host")


class NativeRun:
    """One sampler run, followed by a session.

    Args:
        runs: the model's runs.
        patcher: the MODEL, loaded by ComfyUI.
        host: announces the run.
        kind: runs of the same kind are expected to make equally many passes.
        steps: sampler steps.
        calls: stack for each predicted model call.
        shape: latent shape.

    Attributes:
        session: follows the forward passes.
        lockstep: conditions that share visits.
        policy: session policy.
        shown: run record and events.
    """

    def __init__(
        self,
        runs: NativeRuns,
        patcher: NativePatcher,
        host: Host,
        *,
        kind: Hashable,
        steps: int,
        calls: Sequence[str],
        shape: Sequence[int],
    ) -> None:
        self._runs = runs
        self._loader = patcher.plain_loader
        self._learnt = runs.learnt(kind)
        self._calls: list[str] = []
        self.policy = NativePolicy(
            patcher,
            self._learnt,
            free_vram=host.memory.free_vram,
            calls_done=lambda: self.session.calls_done,
        )
        self.shown = ShownRun(
            host.events,
            patcher.load_device,
            observe=telemetry_options(host),
            steps=steps,
            calls=self._learnt.calls or calls,
            block_counts=runs.weights.block_counts,
            settings=_settings(patcher, shape),
        )
        self.shown.recorder.non_block_bytes = runs.weights.outside_bytes
        self._passes = StackCalls(runs.orders, calls, self._learnt.course)
        self.session = StreamSession(
            self._passes,
            lambda: runs.weights.loaded_engine,
            policy=self.policy,
            recorder=self.shown.recorder,
            # For a cancel while a block is read from a slow disk. Before each block, the hooks
            # check for one.
            poll_waiting=lambda _visit: (
                comfy.model_management.throw_exception_if_processing_interrupted()
            ),
        )
        self.lockstep = Lockstep(self.session, patcher.load_device)

    def follow(self, compute: Callable[[], Result]) -> Result:
        """Return `compute()`, the result of the whole sampler.

        The run ends with it, also after an error.
        """
        runs = self._runs
        runs.close_alone()
        runs.begin_run()
        with self.shown.events, self.shown.recorder.watching(), self.policy.chunked():
            try:
                self.session.begin()
                # After `begin`: from here on, hooks report their blocks to this session.
                runs.current = runs.last = self
                result = compute()
            # Keep the error in no other variable: with the traceback it would form a cycle.
            # ComfyUI's interrupt is a BaseException now, and was an Exception in earlier versions.
            except BaseException as err:
                self._close(err)
                raise
            self._close(None)
            runs.end_run()
            self._learnt.course = tuple(self._passes.course)
            self._learnt.calls = tuple(self._calls)
            self.shown.ended(self.policy.notes)
        return result

    def call(
        self,
        compute: Callable[[Conditions], Predictions],
        call: ModelCall,
        sigma: float,
        stack: str,
    ) -> Predictions:
        """Return the predictions from one model call, computed by one stack's model.

        The call is repeated with a smaller policy after running out of memory. It is also repeated
        after a block was entered from inner modules for the first time.

        A nested call, made by code from other packs, is part of the outer call.
        """
        if self.session.in_call:
            return compute(call.conditions)
        self._calls.append(stack)
        while True:
            try:
                predictions = self._attempt(compute, call, sigma, stack)
                break
            except AbsentWeightError as err:
                if not self._runs.watch_all():
                    raise ValueError(f"{err}, as {self._loader} does") from err
                self.policy.note(
                    f"call {self.session.calls_done} was repeated: another node used modules of "
                    f"block {err.key.block} without calling the block"
                )
                forget(err)
        self.policy.call_ended()
        self.shown.step(self.policy.notes)
        return predictions

    def _attempt(
        self,
        compute: Callable[[Conditions], Predictions],
        call: ModelCall,
        sigma: float,
        stack: str,
    ) -> Predictions:
        for attempt in self.session.attempts(stack, self.session.calls_done, sigma):
            with attempt:
                predictions = self._predict(compute, call)
                self._runs.leave()  # after a failed pass that other code handles
        return predictions

    def _predict(
        self, compute: Callable[[Conditions], Predictions], call: ModelCall
    ) -> Predictions:
        sharing = self.policy.sharing
        if not sharing.decide(call):
            before = self._passes.passes
            predictions = compute(call.conditions)
            sharing.learn(call, self._passes.passes - before)
            return predictions
        parts = self.lockstep.run([partial(compute, call.only(place)) for place in call.computed])
        predictions = list(parts[0])  # with zeros for uncomputed conditions
        for place, part in zip(call.computed, parts, strict=True):
            predictions[place] = part[place]
        return predictions

    def _close(self, error: BaseException | None) -> None:
        self._runs.current = None
        self.session.close(error)
        self._runs.orders = self._passes.orders


def _settings(patcher: NativePatcher, shape: Sequence[int]) -> RunSettings:
    device_total, ram_total = total_bytes(patcher.load_device)
    dtype = str(versions.compute_dtype(patcher.model)).removeprefix("torch.")
    loaded = patcher.memory.policy
    assert loaded is not None, "ComfyUI has loaded the model"
    return RunSettings(
        size="latent " + "x".join(map(str, shape)),
        dtype=SHORT_DTYPES.get(dtype, dtype),
        policy=policy_words(loaded),
        lora=f"{len(patcher.patches)} patched tensors" if patcher.patches else "",
        device_total=device_total,
        ram_total=ram_total,
    )


def sampler_sample(
    host: Host, executor: Any, guider: Any, sigmas: torch.Tensor, *arguments: Any, **settings: Any
) -> torch.Tensor:
    """Wrapper around the sampler in a ComfyUI run, after the model was loaded."""
    patcher: NativePatcher = guider.model_patcher
    compute: Callable[[], torch.Tensor] = partial(executor, guider, sigmas, *arguments, **settings)
    steps = len(sigmas) - 1
    if steps < 1:
        return compute()
    shape = tuple(versions.noise_of_run(arguments, settings).shape)
    # By name: for some samplers, ComfyUI creates a new function in each run.
    function = versions.sampler_function(executor.class_obj)
    calls = _predicted_calls(guider, executor.class_obj, sigmas, *arguments, **settings)
    kind = getattr(function, "__qualname__", type(function).__qualname__), steps, shape, calls
    is_wan = isinstance(patcher.model, comfy.model_base.WAN21)  # the base of all Wan classes
    _announce_notices(host.events, versions.guidance_scale(guider), is_wan=is_wan)
    run = NativeRun(
        patcher.model.runs, patcher, host, kind=kind, steps=steps, calls=calls, shape=shape
    )
    return run.follow(compute)


def _predicted_calls(
    guider: Any, sampler: Any, sigmas: torch.Tensor, extra: Mapping[str, Any], *_: Any, **__: Any
) -> tuple[str, ...]:
    """Return the stack for each expected model call: one per step, or as in a dry run."""
    model = guider.model_patcher.model
    if not isinstance(model, JoinedModel):
        return (STACK,) * (len(sigmas) - 1)
    levels = predicted_sigmas(guider, sampler, sigmas, extra.get("seed"))
    if levels is not None:
        sigmas = torch.tensor([*levels, 0.0])
    return tuple(map(model.expert, sigmas[:-1]))


def _announce_notices(events: Events, cfg: object, *, is_wan: bool) -> None:
    """Show the graph's notices on the node with the cfg, replacing earlier ones, and log them."""
    graph = events.running_graph()
    prompt_id, executing = events.executing()
    node = node_with_cfg(graph, executing)
    notices = cfg_notices(graph, node, cfg, is_wan=is_wan)
    for notice in notices:
        logger.warning("%s", notice.text)
    about = [asdict(notice) for notice in notices]
    events.announce(
        NOTICES_EVENT, {"prompt_id": prompt_id, "node": node, "notices": about, "of_graph": True}
    )


def calc_cond_batch(
    executor: Any,
    model: Any,
    conditions: Conditions,
    x: torch.Tensor,
    timestep: torch.Tensor,
    options: dict[str, Any],
) -> Predictions:
    """Wrapper around one model call in ComfyUI."""
    run: NativeRun | None = model.runs.current

    def compute(conditions: Conditions) -> Predictions:
        return executor(model, conditions, x, timestep, options)  # type: ignore[no-any-return]

    with ExitStack() as calling:
        stack = STACK
        if isinstance(model, JoinedModel):
            stack = model.expert(timestep)
            calling.enter_context(model.calling(stack))
        if run is None:
            return compute(conditions)
        call = ModelCall(model=model, conditions=conditions, shape=tuple(x.shape), options=options)
        return run.call(compute, call, float(timestep.flatten()[0]), stack)
