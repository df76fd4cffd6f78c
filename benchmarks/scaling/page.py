"""The page: one video and a thousand on 1 to 64 GPUs, and how far the simulator is off where somebody has measured."""

from __future__ import annotations

from functools import cache

from wanstream.plan import FleetRun, MeshPlan, propose_mesh
from wanstream.plan.figure_words import share_text, size_text

from ..performance.bars import Bar, Panels, bar_figure
from ..performance.markdown import NOTHING, number, table
from .held_section import held_section
from .homes_section import homes_section
from .measured import OFF, Point, Report, reports
from .setups import COUNTS, DISK_GB_S, MANY, RAM_GIB, SETUPS, SIZE, STEPS, SWITCH, Setup, job_of, many_videos, one_video
from .splits import SPLITS, mesh_of

HEAD = f"""# Scaling

Made by `python benchmarks/scaling_page.py`; a change here is lost. **Everything on this page is simulated, but the
columns called measured**, which are other people's figures. `wanstream plan --workers N` says the same for other GPUs
and videos.

The run: Wan2.2 T2V A14B in bf16, {SIZE}, {STEPS} steps of which {SWITCH} are of the high-noise expert, guidance under
both, weights cold on disk. The machines: up to eight GPUs each, {RAM_GIB} GiB of RAM, {DISK_GB_S:g} GB/s from disk.
"""

MODEL = """## How it is simulated

A worker is simulated as a run without workers is: blocks through buffers, with bus, disk and computing as queues
(`plan/simulate.py`), for two videos in a row, the first from empty buffers. Its computing is that of the whole video
divided by cfg x ring x ulysses. Into each block come, not hidden, per lane:

* Ulysses: four tensors of tokens / workers x 5120 values, of which a worker has its own part already;
* ring: keys and values of all others of the ring;

and into each step the velocities of the other side and of the other tokens. A video goes from stage to stage by way of
the driver, with the history of its solver. A queue goes through the stages with the cells of each as servers. Weights
come whole to each worker, or in shares that are gathered, out of RAM or out of device memory; shares are taken where
they save more than a hundredth. RAM holds one copy per machine. Over PCIe, weights wait while tokens pass.

Not in it: text encoder, VAE and saving; starting workers; a GPU that computes less well with fewer tokens, slower ones
among equals, and everything else that runs on a machine. Rates are makers' figures with the share that is expected of
them:

"""


def page() -> str:
    """docs/scaling.md."""
    parts = [HEAD, _short(), "![One video on 1 to 64 GPUs](scaling.svg)\n"]
    for setup in SETUPS:
        parts += [f"## {setup.name} (simulated)\n", _proposals(setup), *_splits(setup)]
    parts += [homes_section(), held_section(), *_measured(), MODEL + _links()]
    return "\n".join(parts)


def figures() -> dict[str, str]:
    """SVG files beside the page, by name."""
    return {"scaling.svg": _scaling_figure(), "scaling-measured.svg": _measured_figure()}


def _short() -> str:
    """What follows from the tables, with their figures."""

    def gain(count: int, videos: int) -> str:
        plans = [_plan(setup, count, videos) for setup in SETUPS]
        alone = [_plan(setup, 1, videos).run.makespan_s for setup in SETUPS]
        return " and ".join(f"{a / plan.run.makespan_s:.1f}" for a, plan in zip(alone, plans, strict=True))

    over, beside = (setup.links.name for setup in SETUPS)
    return f"""In short, of {over} and {beside}:

* **Many videos** go to GPUs of their own: 8 of them are {gain(8, MANY)} times as fast as one, 64 are {gain(64, MANY)}
  times. Hardly anything passes between them, so the links do not matter.
* **One video** is {gain(8, 1)} times as fast on 8 GPUs, {gain(16, 1)} on 16, {gain(32, 1)} on 32. First
  come the two sides of the guidance, which tell each other next to nothing, then Ulysses inside a machine; what goes
  over the network brings less.
* **Two stages** spare the switch of experts, which costs nothing here while weights stream out of RAM. They wait for
  their slower half ({SWITCH} of {STEPS} steps), so they pay where a switch does not hide: where RAM is short, or
  where the expert that runs stays in device memory.
"""


@cache
def _plan(setup: Setup, count: int, videos: int) -> MeshPlan:
    return propose_mesh(count, job_of(), setup.machine, setup.links, videos)


def _proposals(setup: Setup) -> str:
    """What is proposed for so many GPUs."""
    alone = one_video(setup, mesh_of("data", 1) or _plan(setup, 1, 1).mesh).makespan_s
    rows = []
    for count in COUNTS:
        one, many = _plan(setup, count, 1), _plan(setup, count, MANY)
        rows.append(
            (
                f"{count}",
                _layout(one),
                number(one.run.makespan_s),
                f"{alone / one.run.makespan_s:.1f}x",
                _waits(one.run),
                str(many.mesh),
                number(many.run.makespan_s / 3600),
                f"{MANY * alone / many.run.makespan_s:.1f}x",
                size_text(max(stage.device_bytes for stage in many.run.stages)),
            )
        )
    head = ("GPUs", "for one video", "s", "speed-up", "waiting", f"for {MANY}", "hours", "speed-up", "VRAM")
    said = [
        f"* {count} GPUs, one video: {plan.fewer.mesh.size} of them are faster alone, {plan.fewer.mesh} with "
        f"{number(plan.fewer.makespan_s)} s.\n"
        for count in COUNTS
        if (plan := _plan(setup, count, 1)).fewer is not None
    ]
    return table(head, rows) + "\n" + "".join(said)


def _layout(plan: MeshPlan) -> str:
    return f"{plan.mesh}, {plan.weights}" if plan.weights != "full" else str(plan.mesh)


def _waits(run: FleetRun) -> str:
    """For other workers and for weights."""
    whole_s = run.makespan_s * len(run.loads)
    return share_text(sum(load.exchange_s + load.stall_s for load in run.loads) / whole_s)


def _splits(setup: Setup) -> list[str]:
    """One video, and one of many, under every split."""
    head = ("split", *(f"{count}" for count in COUNTS))
    one, many = [], []
    for split in SPLITS:
        meshes = [mesh_of(split, count) for count in COUNTS]
        one.append(
            (split, *(NOTHING if mesh is None else number(one_video(setup, mesh).makespan_s) for mesh in meshes))
        )
        many.append(
            (split, *(NOTHING if mesh is None else number(many_videos(setup, mesh).video_s) for mesh in meshes))
        )
    return [
        "Seconds of one video, by split and GPUs:\n",
        table(head, one),
        f"Seconds per video of {MANY}:\n",
        table(head, many),
    ]


def _measured() -> list[str]:
    parts = [
        "## Measured by others, beside the simulated figure\n",
        "![Measured and simulated](scaling-measured.svg)\n",
        f"The error is simulated / measured - 1. Where it is above {OFF:.0%}, the last column says why.\n",
    ]
    for report in reports():
        parts += [
            f"### {report.title}\n",
            f"{report.setup}.\n",
            table(("what", "measured", "simulated", "error", "why"), [_row(point) for point in report.points]),
            f"{report.words}\n",
        ]
    return parts


def _row(point: Point) -> tuple[str, ...]:
    values = (f"{number(value, 2)} {point.unit}" for value in (point.measured, point.simulated))
    return (point.what, *values, f"{100 * point.error:+.1f} %", point.remark)


def _links() -> str:
    lines = [f"* {setup.name}: {setup.machine.origin}. {setup.links.origin}." for setup in SETUPS]
    return "\n".join(lines) + "\n"


def _scaling_figure() -> str:
    bars = []
    for setup in SETUPS:
        alone = _plan(setup, 1, 1).run.makespan_s
        for count in COUNTS:
            plan = _plan(setup, count, 1)
            bars.append(
                Bar(
                    label=f"{setup.gpu} x {count}: {plan.mesh}",
                    parts=_parts(plan.run),
                    beside=alone / plan.run.makespan_s,
                    highlighted=count == 1,
                )
            )
    panels = Panels(
        title="One video, simulated",
        parts=["computing", "waiting for other workers", "for weights"],
        unit="s",
        beside="speed-up",
        beside_unit="x",
    )
    return bar_figure(bars, panels)


def _parts(run: FleetRun) -> list[float]:
    """Seconds of the video, stage after stage."""
    stages = run.stages
    told, first = sum(stage.exchange_s for stage in stages), sum(stage.first_s for stage in stages)
    computed = sum(stage.compute_s for stage in stages)
    return [computed, told, first - computed - told]


def _measured_figure() -> str:
    bars = []
    for report in reports():
        for point in report.points:
            if point.unit == "s" and point.measured < 60:
                bars += _pair(report, point)
    panels = Panels(
        title="Measured by others, and simulated (up to a minute)",
        parts=["seconds"],
        unit="s",
        beside="simulated / measured",
        beside_unit="1",
    )
    return bar_figure(bars, panels)


def _pair(report: Report, point: Point) -> list[Bar]:
    ratio = point.simulated / point.measured
    return [
        Bar(label=f"measured, {report.short}: {point.what}", parts=[point.measured], beside=1.0, highlighted=True),
        Bar(label="simulated", parts=[point.simulated], beside=ratio),
    ]
