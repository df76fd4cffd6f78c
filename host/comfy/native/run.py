"""Runs of a native model that streams, by ComfyUI's samplers: blocks are fetched ahead of their forward."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import comfy.model_base
import comfy.model_management
import comfy.patcher_extension
import torch

from ....bench import policy_name
from ....devices import available_bytes, forget, is_out_of_memory, runtime_for, thread_notes, total_bytes
from ....offload import ForwardCourse, Lockstep
from ....plan import (
    WORTH,
    AutoOffload,
    Budgets,
    MeasuredPolicy,
    bytes_to_free,
    choose_measured,
    describe_policy,
    describe_ram,
    next_smaller_policy,
)
from ....sampling import InsufficientMemoryError
from ....schema import OffloadPolicy, Timeline, format_seconds
from ....telemetry import Recorder
from ...api import HostApi, current_host
from ...auto_policy import AVAILABLE_SHARE, smaller_limit
from ...distilled_models import cfg_notices, node_with_cfg
from ...run_events import NOTICES_EVENT, SHORT_DTYPES, RunEvents, RunSettings
from .hooks import NativeRuns
from .lanes import Conditions, ModelCall, VisitSharing
from .patcher import NativePatcher
from .weights import STACK

WRAPPERS = comfy.patcher_extension.WrappersMP

Predictions: TypeAlias = list[torch.Tensor]
"""Prediction of each condition of a model call; zeros for one that is not computed."""

Result = TypeVar("Result")

logger = logging.getLogger("wanstream.host")

BATCH_MARGIN = 1.5
"""Multiple of the estimate for several conditions that must be free for ComfyUI to compute them in one pass."""


class NativeRun:
    """One run of a sampler: the course of its forward passes, its record, its events.

    Args:
        runs: runs of the model.
        patcher: the MODEL, which ComfyUI has loaded.
        host: announces the run.
        kind: runs of one kind are expected to make the same number of passes.
        steps: steps of the sampler.
        shape: shape of the latents.

    Attributes:
        course: the course so far.
        lockstep: conditions that share visits.
        notes: sentences about the run, for its timeline.
        node_id: id of the sampler node.
        settings: settings of the run.
        timeline: timeline of the run, after its end.
    """

    def __init__(
        self,
        runs: NativeRuns,
        patcher: NativePatcher,
        host: HostApi,
        *,
        kind: Hashable,
        steps: int,
        shape: Sequence[int],
    ) -> None:
        self.notes: list[str] = []
        self.timeline: Timeline | None = None
        self.calls = self.passes = self.recompiled = self.visits = self.fetches = 0
        self._runs, self._weights, self._memory = runs, runs.weights, patcher.memory
        self._device = patcher.load_device
        self._learnt, self._attempts, self._auto = runs.learnt(kind), 0, patcher.auto
        self._calling = False
        self._free_vram = host.free_vram
        self._sharing = VisitSharing(
            patcher.share_visits,
            self._learnt,
            automatic=self._auto is not None,
            free_bytes=self._free_vram,
            note=self._note,
        )
        self._orders: list[tuple[int, ...]] = []  # of the passes so far
        options = replace(host.telemetry_options(), on_visits=self._report_visits)
        self.recorder = Recorder(patcher.load_device, observe=options)
        self.recorder.non_block_bytes = self._weights.outside_bytes
        self.node_id, self.settings = host.executing_node(), _settings(patcher, shape)
        self.events = RunEvents(
            host.announce,
            prompt_id=host.run_id(),
            node_id=self.node_id,
            experts=[STACK] * (self._learnt.calls or steps),
            settings=self.settings,
            notes=thread_notes(self._device),
        )
        self._bar = host.progress(steps, self.node_id)
        self._calls_per_step = max(1.0, (self._learnt.calls or steps) / steps)
        self._start(len(self._learnt.course) or steps)

    def _report_visits(self, expert: str, done: int) -> None:
        step, share = self.events.visits(done, self._weights.block_counts[expert])
        if step == 0:  # later steps belong to ComfyUI's sampler, which moves the bar itself
            self._bar.advance(share / self._calls_per_step)

    def follow(self, compute: Callable[[], Result]) -> Result:
        """Return the result of `compute`, the whole sampler; the run ends with it, after an error too."""
        runs = self._runs
        with self.events, self.recorder.watching():
            try:
                self.course.begin(self._expected, self.recorder)
                runs.current = runs.last = self
                result = compute()
            except BaseException as err:  # kept in no other variable: with its traceback it would be a cycle
                runs.current = None
                self._close(err)
                raise
            runs.current = None
            self._close(None)
            self._learnt.course, self._learnt.calls = tuple(self._orders), self.calls
            self.timeline = replace(self.recorder.timeline(), changes=tuple(self.notes))
            self.events.ended(self.timeline)
        return result

    def call(self, compute: Callable[[Conditions], Predictions], call: ModelCall, sigma: float) -> Predictions:
        """Return the predictions of one model call; with a smaller policy after an out-of-memory error.

        A call inside another one, by code of other packs, is a part of it.
        """
        if self._calling:
            return compute(call.conditions)
        self._calling = True
        try:
            while True:
                try:
                    with self.recorder.step(self.calls, STACK, sigma):
                        predictions = self._predict(compute, call)
                    break
                except RuntimeError as err:
                    if not is_out_of_memory(err):
                        raise
                    self._close(err)
                    # The traceback keeps the activations of the pass alive, and the retry needs their memory.
                    message = forget(err)
                if self._sharing.can_stop:
                    self._stop_sharing()
                else:
                    self._make_smaller(message)
        finally:
            self._calling = False
        self.calls += 1
        self.events.step(self.recorder.last, self.notes)
        if self._auto is not None and not self._sharing.active and not self._attempts:
            self._choose_policy(self._auto)
        return predictions

    def _predict(self, compute: Callable[[Conditions], Predictions], call: ModelCall) -> Predictions:
        if not self._sharing.decide(call):
            before = self.course.passes
            predictions = compute(call.conditions)
            self._sharing.learn(call, self.course.passes - before)
            return predictions
        parts = self.lockstep.run([partial(compute, call.only(place)) for place in call.computed])
        predictions = list(parts[0])  # with zeros for conditions that are not computed
        for place, part in zip(call.computed, parts, strict=True):
            predictions[place] = part[place]
        return predictions

    def _free(self, budgets: Budgets, activations: int) -> Budgets:
        """Return the budgets, limited to the memory that is free now and what the weights use already."""
        ram = int(AVAILABLE_SHARE * available_bytes())
        if runtime_for(self._device) is None:
            ram = max(0, ram + self._weights.loaded_bytes - activations)
            return Budgets(ram_bytes=smaller_limit(budgets.ram_bytes, ram))
        vram = max(0, self._free_vram() + self._weights.loaded_bytes - activations)
        return Budgets(
            vram_bytes=smaller_limit(budgets.vram_bytes, vram), ram_bytes=smaller_limit(budgets.ram_bytes, ram)
        )

    def _stop_sharing(self) -> None:
        assert self._memory.policy is not None, "the model is loaded"
        self._sharing.stop()
        self._note(f"out of memory in call {self.calls}: the conditions no longer share visits")
        self._continue_with(self._memory.policy)
        comfy.model_management.soft_empty_cache()

    def _note(self, text: str) -> None:
        if text not in self.notes:
            logger.info("%s", text)
            self.notes.append(text)

    def _start(self, passes: int) -> None:
        engine = self._weights.loaded_engine
        # Of an earlier run of this kind, without the passes that this run has behind it.
        orders = replace(self._runs.orders, course=self._learnt.course[self.passes :])
        # A cancel while a block is read from a slow disk. Before each block, the hooks look for one.
        poll = comfy.model_management.throw_exception_if_processing_interrupted
        self.course = ForwardCourse(engine, orders, poll=poll)
        self.lockstep = Lockstep(self.course, engine.device)
        self._expected = passes

    def _close(self, error: BaseException | None) -> None:
        """End the course and keep its figures; closing twice counts them once."""
        if not self.course.is_open:
            return
        self.course.close(error)
        self._runs.orders = replace(self.course.orders, course=())
        self._orders += self.course.course
        for figure in ("passes", "recompiled", "visits", "fetches"):
            setattr(self, figure, getattr(self, figure) + getattr(self.course, figure))

    def _choose_policy(self, auto: AutoOffload) -> None:
        """Replace the policy after the first model call of its kind if another one is predicted to be faster."""
        sharing, memory = self._sharing, self._memory
        if sharing.key in self._learnt.shares:
            return
        assert memory.policy is not None, "the model is loaded"
        present = memory.policy
        can_share = sharing.lanes > 1
        together = self._predict_fastest(auto.budgets, shared=True) if can_share else None
        apart = None if can_share and sharing.is_required else self._predict_fastest(auto.budgets)
        # More memory for activations must be worth it.
        shares = together is not None and (apart is None or together.call_s < (1 - WORTH) * apart.call_s)
        self._learnt.shares[sharing.key] = shares
        chosen = together if shares else apart
        if chosen is None or chosen.policy == present:
            return
        self._note(
            f"after the first call: {describe_policy(chosen.policy, len(self._weights.blocks))}, "
            f"{describe_ram(chosen.policy)}, {format_seconds(chosen.call_s)} s per call predicted"
        )
        try:
            self._continue_with(chosen.policy)
        except (OSError, RuntimeError) as err:  # other processes have allocated memory since it was measured
            if isinstance(err, RuntimeError) and not is_out_of_memory(err):
                raise
            self._note(f"{policy_name(present)} is kept: {forget(err)}")
        else:
            memory.requested = chosen.policy
            return
        self._continue_with(present)

    def _predict_fastest(self, budgets: Budgets, *, shared: bool = False) -> MeasuredPolicy | None:
        """Return the fastest policy for calls like the last one, or for such calls with shared visits."""
        assert self._memory.policy is not None, "the model is loaded"
        sharing, activations = self._sharing, self._sharing.pass_bytes
        if shared:
            activations = sharing.lanes_bytes
        elif sharing.batched > 1:
            activations = int(BATCH_MARGIN * sharing.batched * activations)
        free = self._free(budgets, activations)
        return choose_measured(
            self._weights.measured_blocks,
            self.recorder.last,
            passes=sharing.shared_passes if shared else sharing.passes,
            present=self._memory.policy,
            device_bytes=math.inf if free.vram_bytes is None else free.vram_bytes,
            host_bytes=math.inf if free.ram_bytes is None else free.ram_bytes,
            keep_present=not shared,
        )

    def _make_smaller(self, message: str) -> None:
        """Continue with a smaller policy. Raises InsufficientMemoryError if there is none."""
        weights, memory = self._weights, self._memory
        assert memory.policy is not None, "the model is loaded"
        smaller = next_smaller_policy(
            memory.policy,
            weights.block_counts,
            missing=bytes_to_free(self._attempts, block=weights.buffer_bytes, working_bytes=0, free_bytes=None),
            tokens=1,
            device_bytes=weights.device_bytes,
        )
        if smaller is None:
            raise InsufficientMemoryError(
                f"{message}. No block is resident, so the policy cannot get smaller: make the "
                "video or image smaller, or its batch"
            )
        self._attempts += 1
        self._note(
            f"out of memory in call {self.calls}: {policy_name(smaller)} instead of {policy_name(memory.policy)}"
        )
        self._continue_with(smaller)
        comfy.model_management.soft_empty_cache()

    def _continue_with(self, policy: OffloadPolicy) -> None:
        """Change the policy between two model calls."""
        self._close(None)
        with torch.inference_mode(False):  # buffers outlive the run
            self._weights.engine(policy, self._device)
        self._memory.policy = policy
        self._start(max(1, self._expected - self.course.passes))
        self.course.begin(self._expected, self.recorder)


def _settings(patcher: NativePatcher, shape: Sequence[int]) -> RunSettings:
    device_total, ram_total = total_bytes(patcher.load_device)
    # `get_dtype_inference` is missing in 0.3.64.
    dtype = str(patcher.model.manual_cast_dtype or patcher.model.get_dtype()).removeprefix("torch.")
    loaded = patcher.memory.policy
    assert loaded is not None, "ComfyUI has loaded the model"
    return RunSettings(
        size="latent " + "x".join(map(str, shape)),
        dtype=SHORT_DTYPES.get(dtype, dtype),
        policy=policy_name(loaded) + (", RAM" if loaded.source == "pinned" else ""),
        lora=f"{len(patcher.patches)} patched tensors" if patcher.patches else "",
        device_total=device_total,
        ram_total=ram_total,
    )


def sampler_sample(executor: Any, guider: Any, sigmas: torch.Tensor, *arguments: Any, **settings: Any) -> torch.Tensor:
    """Wrapper of ComfyUI around the sampler of one run, after the model was loaded."""
    patcher: NativePatcher = guider.model_patcher
    compute: Callable[[], torch.Tensor] = partial(executor, guider, sigmas, *arguments, **settings)
    steps = len(sigmas) - 1
    if steps < 1:
        return compute()
    noise: torch.Tensor = arguments[2] if len(arguments) > 2 else settings["noise"]
    sampler, shape = executor.class_obj, tuple(noise.shape)
    # By name: ComfyUI makes a new function for each run of some samplers.
    function = getattr(sampler, "sampler_function", type(sampler))
    kind = getattr(function, "__qualname__", type(function).__qualname__), steps, shape
    is_wan = isinstance(patcher.model, comfy.model_base.WAN21)  # the base of all Wan classes
    _announce_notices(current_host(), getattr(guider, "cfg", None), is_wan=is_wan)
    run = NativeRun(patcher.model.runs, patcher, current_host(), kind=kind, steps=steps, shape=shape)
    return run.follow(compute)


def _announce_notices(host: HostApi, cfg: object, *, is_wan: bool) -> None:
    """Show the notices from the graph on the node with the cfg, in place of earlier ones, and log them."""
    graph = host.running_graph()
    node = node_with_cfg(graph, host.executing_node())
    notices = cfg_notices(graph, node, cfg, is_wan=is_wan)
    for notice in notices:
        logger.warning("%s", notice.text)
    about = [asdict(notice) for notice in notices]
    host.announce(NOTICES_EVENT, {"prompt_id": host.run_id(), "node": node, "notices": about, "of_graph": True})


def calc_cond_batch(
    executor: Any, model: Any, conditions: Conditions, x: torch.Tensor, timestep: torch.Tensor, options: dict[str, Any]
) -> Predictions:
    """Wrapper of ComfyUI around one model call."""
    run: NativeRun | None = model.runs.current

    def compute(conditions: Conditions) -> Predictions:
        predictions: Predictions = executor(model, conditions, x, timestep, options)
        return predictions

    if run is None:
        return compute(conditions)
    call = ModelCall(model=model, conditions=conditions, shape=tuple(x.shape), options=options)
    return run.call(compute, call, float(timestep.flatten()[0]))
