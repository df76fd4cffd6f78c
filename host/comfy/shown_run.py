"""Record, events and progress bar for one run driven by a ComfyUI sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...devices import thread_notes
from ...schema.records import Timeline
from ...telemetry import Recorder, TelemetryOptions
from ..events import Events
from ..run_events import RunEvents, RunSettings


class ShownRun:
    """A run on the canvas, from the first model call to the last.

    Args:
        events: announces the run.
        device: run device.
        observe: recorder settings.
        steps: sampler steps.
        calls: stack for each predicted model call.
        block_counts: number of blocks by stack name.
        settings: shown in the table of runs.
        notes: sentences known before the run. Empty ones are left out.
        predicted: simulated timeline.
        shown_at: id of the displaying node, or None for the executing node.

    Attributes:
        node_id: sampler node id.
        timeline: the measured run, available when it has ended.
    """

    def __init__(  # noqa: PLR0913 (of a recorder, events and a bar)
        self,
        events: Events,
        device: torch.device,
        *,
        observe: TelemetryOptions,
        steps: int,
        calls: Sequence[str],
        block_counts: Mapping[str, int],
        settings: RunSettings,
        notes: Sequence[str] = (),
        predicted: Timeline | None = None,
        shown_at: str | None = None,
    ) -> None:
        options = replace(observe, on_visits=self._report_visits)
        self.recorder = Recorder(device, observe=options)
        prompt_id, self.node_id = events.executing()
        self.settings = settings
        self.timeline: Timeline | None = None
        self._notes = [note for note in (*notes, *thread_notes(device)) if note]
        self.events = RunEvents(
            events.announce,
            prompt_id=prompt_id,
            node_id=self.node_id,
            shown_at=shown_at,
            experts=calls,
            predicted=predicted,
            settings=settings,
            notes=self._notes,
            is_stop=events.is_stop,
        )
        self._block_counts = block_counts
        # A schedule with one sigma has no step.
        steps = max(1, steps)
        self._bar = events.progress(steps, self.node_id)
        self._calls_per_step = max(1.0, len(calls) / steps)

    def _report_visits(self, stack: str, done: int) -> None:
        step, share = self.events.visits(done, self._block_counts[stack])
        if step == 0:  # in later steps, ComfyUI's sampler moves the bar itself
            self._bar.advance(share / self._calls_per_step)

    def step(self, changes: Sequence[str]) -> None:
        """Announce the last recorded model call, and all policy changes so far."""
        self.events.step(self.recorder.last, changes)

    def ended(self, changes: Sequence[str]) -> Timeline:
        """Announce the end of the run, and return the timeline."""
        self.timeline = replace(self.recorder.timeline(), changes=(*self._notes, *changes))
        self.events.ended(self.timeline)
        return self.timeline
