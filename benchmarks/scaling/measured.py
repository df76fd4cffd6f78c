"""What others have measured with several GPUs, and what the planner says of the same set-ups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from wanstream.plan import I2V_A14B, Links, Mesh, OffloadJob, simulate_fleet
from wanstream.plan.fleet_exchange import handover_seconds
from wanstream.plan.fleet_queue import StageSeconds, run_queue
from wanstream.plan.gpus import GPUS, expected_machine
from wanstream.plan.links import LINKS
from wanstream.plan.workers_ref import WeightHome

from .setups import GIB, job_of

OFF = 0.15
"""Errors above that share have a remark that says why."""

SEEN_BUS, SLOWED = 12.4e9, 1.395
"""What fetches got of the bus of those four H100 while nobody else used it, and how much longer collectives took beside
them: a study with nsys of the same engine on such machines, published on 24 February 2026."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A measured figure beside the simulated one."""

    what: str
    unit: str
    measured: float
    simulated: float
    remark: str = ""

    @property
    def error(self) -> float:
        """How far the simulated figure is off, as a share of the measured one."""
        return self.simulated / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Report:
    """One document with measurements."""

    title: str
    short: str
    """For a bar's label."""
    setup: str
    points: tuple[Point, ...]
    words: str
    """What to know before the figures are compared."""


@cache
def reports() -> tuple[Report, ...]:
    """All of them."""
    return (_h100_over_pcie(), _earlier_h100_over_pcie(), _rtx_5090(), _pipeline(), _first_block_cache())


def _step_s(gpu: str, links: Links, mesh: Mesh, job: OffloadJob, home: WeightHome, bus: float | None = None) -> float:
    """Of a usual step, all weights in RAM."""
    machine = expected_machine(gpu, ram_bytes=1024 * GIB, disk_bytes_per_s=3e9)
    if bus is not None:
        machine = replace(machine, h2d_bytes_per_s=bus)
    run = simulate_fleet(job, machine, links, mesh, weights=(home,))
    return sum(stage.next_s for stage in run.stages) / len(job.experts_of_steps)


def _two_passes(job: OffloadJob) -> OffloadJob:
    """For engines that bring the weights once for each side of the guidance."""
    return replace(
        job, stored_bytes=2 * job.stored_bytes, file_bytes=2 * job.file_bytes, computed_bytes=2 * job.computed_bytes
    )


def _point(what: str, measured: float, simulated: float, remark: str = "") -> Point:
    return Point(what=what, unit="s", measured=measured, simulated=simulated, remark=remark)


def _h100_steps() -> dict[str, float]:
    """Seconds per step of four H100 on PCIe cards: from makers' figures, and from what was seen of the bus."""
    job, mesh, made = _two_passes(job_of(steps=27, switch=18)), Mesh(ulysses=4), LINKS["pcie5"]
    seen = replace(made, peer_bytes_per_s=SEEN_BUS / 2)
    beside_fetches = replace(made, peer_bytes_per_s=SEEN_BUS / 2 / SLOWED)
    return {
        "made": _step_s("H100 PCIe", made, mesh, job, "full"),
        "full": _step_s("H100 PCIe", beside_fetches, mesh, job, "full", SEEN_BUS),
        "sharded": _step_s("H100 PCIe", seen, mesh, job, "sharded", SEEN_BUS),
    }


def _h100_over_pcie() -> Report:
    steps = _h100_steps()
    made = "the bus of that machine gave a quarter of what it should, and collectives half of that, see the next rows"
    warm = "42 s of the first step are compiling and warming up, which is not simulated"
    moved = "20 s of the first step are warming up, and 27 s a blocking copy of the second expert, which we do not make"
    return Report(
        title="Layerwise offload against FSDP offload, sglang 0.5.8, 15 February 2026",
        short="H100 PCIe",
        setup="4 x H100 PCIe, Wan2.2 T2V A14B, 1280x720x81, 27 steps (18 + 9), Ulysses 4, two passes over the weights",
        points=(
            _point("layerwise, step, makers' figures", 23.0, steps["made"], made),
            _point("FSDP, step, makers' figures", 20.0, steps["made"], made),
            _point("layerwise, step, bus as seen", 23.0, steps["full"]),
            _point("FSDP, step, bus as seen", 20.0, steps["sharded"]),
            _point("layerwise, 27 steps, bus as seen", 662.2, 27 * steps["full"], warm),
            _point("FSDP, 27 steps, bus as seen", 585.7, 27 * steps["sharded"], moved),
        ),
        words="Another engine, so only its shape can be simulated: Ulysses over four, every GPU with all weights "
        "(layerwise) or a quarter and a gather (FSDP). With makers' figures the step is far too short. A study of the"
        " same engine on such machines saw 12.4 GB/s on the bus, a quarter of what 16 lanes of PCIe 5.0 can, and "
        "collectives that take 39.5 % longer beside fetches. With these two figures, and half of the bus between GPUs"
        " (assumed as everywhere on this page: what collectives got is not in the report), the steps come out within "
        "a tenth. `wanstream probe` measures the bus of a machine, and `wanstream plan --gpu this` plans with it.",
    )


def _earlier_h100_over_pcie() -> Report:
    steps = _h100_steps()
    return Report(
        title="The same before, under torch.profiler, 9 February 2026",
        short="H100 PCIe, profiled",
        setup="As above with flow shift 3, so 9 + 18 steps",
        points=(
            _point("layerwise, step, bus as seen", 21.6, steps["full"]),
            _point("FSDP, step, bus as seen", 19.8, steps["sharded"]),
        ),
        words="Where the switch lies does not change a step. Its totals (788.2 and 714.1 s) contain the profiler. It "
        "also has what copies reached: 7.55 GB/s in the median of FSDP's, 36.7 GB/s of few large ones.",
    )


def _rtx_5090() -> Report:
    job, gpu = job_of("832x480x81", 20, 10), "RTX 5090"
    flops = 2 * job.expert.blocks * job.expert.block_flops(job.tokens)
    peak = GPUS[gpu].tflops * 1e12
    alone = _step_s(gpu, LINKS["pcie5"], Mesh(), job, "full")
    eight = _step_s(gpu, LINKS["pcie5"], Mesh(ulysses=8), job, "sharded in VRAM")
    measured_alone, measured_eight = 134.0 / 20, (41.0 - 25.0) / 10

    def impossible(seconds: float, gpus: int) -> str:
        return f"{flops / gpus / seconds / 1e12:.0f} TFLOP/s on each GPU, of {peak / 1e12:.1f} that it can by its maker"

    return Report(
        title="The official generate.py with FSDP and Ulysses, 16 September 2025",
        short="RTX 5090",
        setup="1 and 8 x RTX 5090, Wan2.2 T2V A14B, said to be 832x480x81 with guidance",
        points=(
            _point("1 GPU, step (134 s for 20)", measured_alone, alone, impossible(measured_alone, 1)),
            _point("8 GPUs, step (41 s less 25 s for 10)", measured_eight, eight, impossible(measured_eight, 8)),
            Point(
                what="speed-up of a step",
                unit="x",
                measured=measured_alone / measured_eight,
                simulated=alone / eight,
                remark="both times are impossible, so their ratio means little",
            ),
        ),
        words="This cannot be simulated: for the video that it names, the GPUs would have to compute faster than they"
        " can. Fewer frames would explain it; the report itself doubts one of its rows (10 steps on one GPU in 9.57 "
        "s). Its loading times (54 s on one GPU, 69 to 71 s on eight) have nothing that corresponds here: the first "
        "block computes while the others are still read.",
    )


def _pipeline() -> Report:
    alone_s = 3.99

    def points() -> Iterator[Point]:
        for stages, measured_s in ((2, 4.22), (4, 4.15), (7, 4.43)):
            each = StageSeconds(first_s=alone_s / stages, next_s=alone_s / stages)
            small = replace(job_of("512x512x53", 28, 28), tokens=14 * 32 * 32)
            handover_s = handover_seconds(small, Mesh(stage=stages), LINKS["loopback"])
            simulated_s = run_queue([each] * stages, cells=1, videos=1, handover_s=handover_s).makespan_s
            yield Point(
                what=f"one sample through {stages} stages", unit="s", measured=measured_s, simulated=simulated_s
            )

    return Report(
        title="Pipeline over steps with a stand-in UNet, 8 February 2026",
        short="UNet",
        setup="Processes on one machine with gloo, 28 steps of a network that computes next to nothing",
        points=tuple(points()),
        words="One sample is in one stage at a time, so stages do not make it faster; the report shows the same. Its "
        "own time for one process is taken, and handing over is simulated; starting processes, which is most of these"
        " four seconds, is not. With a real model the report has no figures: its runs ended out of memory or with the"
        " wrong number of channels. What its design can do needs several samples in flight, which is the row of two "
        "stages above.",
    )


def _first_block_cache() -> Report:
    def seconds(gpu: str, size: str, gpus: int) -> float:
        job = job_of(size, 30, 30, expert=I2V_A14B)
        return 30 * _step_s(gpu, LINKS["nvlink"], Mesh(ulysses=gpus), job, "full")

    skips = "blocks that the cache skips are not in the report; the simulated run skips none"
    outside = f"some 40 s outside denoising are in it; {skips}"
    return Report(
        title="Context parallelism with a first-block cache, ParaAttention",
        short="NVLink",
        setup="2 to 8 GPUs with NVLink, Wan2.1 I2V 14B (one expert of the same size), 81 frames, 30 steps, guidance "
        "assumed",
        points=(
            _point("8 x A100, 1280x720, threshold 0.03", 280.0, seconds("A100 80GB", "1280x720x81", 8)),
            _point("8 x H100, 1280x720, threshold 0.1", 100.0, seconds("H100", "1280x720x81", 8), skips),
            _point("4 x H100, 1280x720, threshold 0.1", 160.0, seconds("H100", "1280x720x81", 4), skips),
            _point("8 x H100, 1024x576, threshold 0.1, denoising", 65.0, seconds("H100", "1024x576x81", 8)),
            _point("4 x H100, 1024x576, threshold 0.1, all", 129.04, seconds("H100", "1024x576x81", 4), outside),
            _point("2 x H100, 1024x576, threshold 0.1, all", 191.26, seconds("H100", "1024x576x81", 2), outside),
        ),
        words="A cache leaves out blocks whose input has hardly changed, at the price of a changed video. How many it"
        " left out is not told, so these are runs without it: an upper bound where the cache did much (threshold "
        "0.1), close where it did little (0.03). Rows that are near although the cache was at work are so by what the"
        " times contain besides.",
    )
