"""Node that describes workers: number, layout and addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from ..host import current_host, io, search_aliases
from ..host.workers import check_ray, cluster, cluster_names, gpus_of
from ..schema import Mesh
from ..schema.refs import (
    GOALS,
    LOCAL,
    WEIGHT_PLACEMENTS,
    WorkersError,
    WorkersRef,
    check_count,
    check_degrees,
)
from . import sockets
from .inputs import known, limits

if TYPE_CHECKING:
    from typing_extensions import Unpack  # `typing` has it from Python 3.11 on

MANUAL = "manual"
LAYOUTS = (*GOALS, MANUAL)
MAX_WORKERS = 64

_DEGREES = {
    "data": (
        MAX_WORKERS,
        "Videos of a batch that are computed at the same time. Costs nothing; no gain for one "
        "video.",
    ),
    "stage": (
        MAX_WORKERS,
        "Ranges of steps: a video moves from one to the next, and with 2 each worker keeps one "
        "expert. For batches; no gain for one video.",
    ),
    "cfg": (
        2,
        "2: positive and negative prompt are computed in parallel. Costs one exchange per step; "
        "needs guidance.",
    ),
    "ring": (
        MAX_WORKERS,
        "Parts of every video's tokens; keys and values circulate. Costs an exchange in every "
        "block. On GPUs only.",
    ),
    "ulysses": (
        40,
        "Parts of every video's tokens and heads; must divide the 40 heads. Costs four exchanges "
        "in every block: use NVLink or a fast bus.",
    ),
}
"""Axes in the manual layout: the largest degree, and the start of the tooltip."""

AXES = tuple(_DEGREES)
NUMERIC_INPUTS = ("count", *AXES)

LAYOUT_INPUTS: tuple[io.Input, ...] = (
    io.Int.Input(
        "count",
        default=2,
        **limits(1, MAX_WORKERS),
        tooltip="Worker processes, with one GPU each; on a machine without a GPU they share its "
        "CPU. Each costs some seconds to start, once, the RAM of a Python with torch, and its "
        "own buffers.",
    ),
    io.Combo.Input(
        "layout",
        options=list(LAYOUTS),
        default=GOALS[0],
        tooltip="latency: all workers compute the same video. throughput: the videos of a batch "
        "are distributed, with less overhead. manual: the five degrees.",
    ),
    *(
        io.Int.Input(
            axis,
            default=1,
            **limits(1, largest),
            tooltip=f"{text} Read with the layout {MANUAL} only.",
        )
        for axis, (largest, text) in _DEGREES.items()
    ),
)

LIFE_INPUTS: tuple[io.Input, ...] = (
    io.Int.Input(
        "max_restarts",
        default=3,
        **limits(0, 100),
        optional=True,
        tooltip="Restarts of each worker group within an hour, after a worker died. A restart "
        "costs the start of a worker and about a minute of steps, or one step if the group's "
        "first worker is alive. 0: a dead worker ends the run.",
    ),
    io.Float.Input(
        "timeout_s",
        default=300.0,
        **limits(1.0, 3600.0, step=1.0),
        optional=True,
        tooltip="Seconds until a worker that does not answer another is replaced as hung. Must be "
        "longer than the slowest block, first reads from disk included.",
    ),
)


def workers_inputs() -> list[io.Input]:
    """Return all inputs in a fixed order, because saved workflows depend on it."""
    return [
        *LAYOUT_INPUTS,
        io.Combo.Input(
            "cluster",
            options=cluster_names(),
            default=LOCAL,
            tooltip="local: this machine's GPUs. in-process: one worker in this process, without "
            "Ray. Other names are Ray clusters from your list (clusters.json, see "
            "docs/workers.md). A network adds its time to every exchange.",
        ),
        io.Combo.Input(
            "weights",
            options=list(WEIGHT_PLACEMENTS),
            default=WEIGHT_PLACEMENTS[0],
            tooltip="full: every worker copies all blocks from RAM, which workers on one machine "
            "share. sharded: each copies 1/N and gathers the rest from the others; costs bytes "
            "between workers, saves bytes from RAM or disk. sharded in VRAM: 1/N is resident "
            "there. auto: measured on GPUs, full on a CPU.",
        ),
        io.Int.Input(
            "threads",
            default=0,
            **limits(0, 256),
            optional=True,
            tooltip="CPU threads of each worker. 0: the cores of a machine, divided among its "
            "workers. More threads than cores cost time.",
        ),
        *LIFE_INPUTS,
    ]


class WorkersWidgets(TypedDict, total=False):
    """Widgets for `workers_inputs`. Older workflows may lack some."""

    count: int
    layout: str
    data: int
    stage: int
    cfg: int
    ring: int
    ulysses: int
    cluster: str
    weights: Any
    threads: int
    max_restarts: int
    timeout_s: float


def check_known(*, gpus: int | None, **inputs: object) -> None:
    """Raise WorkersError or MeshError for impossible workers.

    Called in `validate_inputs`, before any node runs.
    """
    numbers = {name: inputs.pop(name, None) for name in NUMERIC_INPUTS}
    # A linked input is None until the run.
    texts = {name: value for name, value in inputs.items() if value is not None}
    _check({**texts, **known(int, **numbers)}, gpus=gpus)


def workers_ref(*, gpus: int | None, **widgets: Unpack[WorkersWidgets]) -> WorkersRef:
    """Return the workers described by the widgets.

    Raises WorkersError or MeshError for an impossible layout.
    """
    _check(widgets, gpus=gpus)
    is_manual = widgets["layout"] == MANUAL
    return replace(
        cluster(widgets["cluster"]),
        count=widgets["count"],
        mesh=_mesh(widgets) if is_manual else None,
        # The manual layout is no goal, but the field needs one.
        goal=next((goal for goal in GOALS if goal == widgets["layout"]), GOALS[0]),
        weights=widgets["weights"],
        # The widget has no empty value, so 0 stands for None.
        threads=widgets.get("threads") or None,
        # Workflows saved before these inputs existed lack them, and ComfyUI fills in no defaults.
        max_restarts=widgets.get("max_restarts", WorkersRef.max_restarts),
        timeout_s=widgets.get("timeout_s", WorkersRef.timeout_s),
    )


def _mesh(widgets: Mapping[str, Any]) -> Mesh:
    return Mesh(**{axis: widgets[axis] for axis in AXES})


def _check(inputs: Mapping[str, Any], *, gpus: int | None) -> None:
    layout = inputs.get("layout", GOALS[0])
    if layout not in LAYOUTS:
        raise WorkersError(f"the layout is {layout!r}: choose one of {', '.join(LAYOUTS)}")
    # A linked cluster is unknown at this point. Without its address, only local limits are checked.
    address = cluster(inputs["cluster"]).address if "cluster" in inputs else ""
    count = inputs.get("count")
    if count is None:
        return
    check_count(count, address, gpus=gpus, most=MAX_WORKERS)
    if layout == MANUAL and inputs.keys() >= {*AXES}:
        check_degrees(_mesh(inputs), count)


class WanStreamWorkers(io.ComfyNode):
    """Reference to workers. They start with the first run that needs them and are kept after it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamWorkers",
            display_name="Wan Workers (many GPUs)",
            category="WanStream/offload",
            **search_aliases("multigpu, multi gpu, two gpus, ray, distributed, parallel, ulysses"),
            description="Runs Wan Sampler on several GPUs of this machine or of a Ray cluster: one "
            "video faster, or the videos of a batch at the same time. The result is the same. "
            "Needs Ray: pip install ray.",
            inputs=workers_inputs(),
            outputs=[sockets.Workers.Output(display_name="workers")],
        )

    @classmethod
    def validate_inputs(
        cls,
        count: int | None = None,
        layout: str | None = None,
        data: int | None = None,
        stage: int | None = None,
        cfg: int | None = None,
        ring: int | None = None,
        ulysses: int | None = None,
        cluster: str | None = None,
    ) -> bool:
        # Parameters by name: with `**inputs`, ComfyUI would check no range and no choice itself.
        degrees = {"data": data, "stage": stage, "cfg": cfg, "ring": ring, "ulysses": ulysses}
        gpus = gpus_of(current_host().memory.device())
        check_known(gpus=gpus, count=count, layout=layout, **degrees, cluster=cluster)
        return True

    @classmethod
    def execute(cls, **widgets: Unpack[WorkersWidgets]) -> io.NodeOutput:
        ref = workers_ref(gpus=gpus_of(current_host().memory.device()), **widgets)
        # Checked here so a missing Ray is reported on this node and not on the sampler.
        check_ray(ref)
        return io.NodeOutput(ref)
