"""Benchmark node: reports one sampler run, or a matrix of runs, as tables, chart and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..bench import (
    MAX_PAUSE_S,
    MAX_PREFETCH,
    MAX_RUNS,
    MAX_STEPS,
    Policy,
    Rank,
    Report,
    TrialMatrix,
    TrialTimes,
    ranking,
    summary,
)
from ..host import current_host, io, search_aliases
from . import sockets
from .decode import check_name
from .inputs import known, limits, prefix_input
from .offload import policy_node
from .runs.benchmark import Benchmark, MeasuredModel, ReportFiles, measure, named_runs
from .runs.run_experts import SamplerRun
from .sampler import TIMELINE

TITLE = "WanStream benchmark"

REPORT = "wanstream_report"
"""History key for the summary."""
RANKING = "wanstream_ranking"
"""History key for the variants from the fastest to the slowest."""


BENCHMARK_INPUTS: tuple[io.Input, ...] = (
    sockets.Run.Input(
        "run",
        tooltip="From Wan Sampler or Run of Streamed Model: the run to measure, and the reference "
        "for others.",
    ),
    io.Int.Input(
        "warmup",
        default=0,
        **limits(0, MAX_RUNS),
        tooltip="First runs of each variant, which are not counted. Each costs a whole run; "
        "the first one fetches the resident blocks and fills the page cache.",
    ),
    io.Int.Input(
        "repeats",
        default=1,
        **limits(1, MAX_RUNS),
        tooltip="Measured runs of each variant, each a whole run. 1, without warm-up and "
        "variants: the finished run is reported, and nothing is run again. The spread "
        "means something from 3 on.",
    ),
    io.Float.Input(
        "cooldown_s",
        default=0.0,
        **limits(0.0, MAX_PAUSE_S, step=1.0),
        tooltip="Seconds of pause before each run, so that a hot GPU does not slow the next "
        "one down.",
    ),
    io.String.Input(
        "policies",
        tooltip="Policies to compare, separated by commas: layerwise, block_swap 20, resident, "
        "auto. Empty: the policy of the run. Each one costs warmup + repeats runs; resident "
        "takes the memory of both experts.",
    ),
    io.String.Input(
        "prefetch",
        tooltip=f"Prefetch depths (0 to {MAX_PREFETCH}) to try with layerwise and block_swap: "
        "1, 2. Empty: that of the run. Each multiplies the runs; one more block ahead "
        "costs 0.70 GB in bf16.",
    ),
    io.String.Input(
        "steps",
        tooltip=f"Numbers of steps (1 to {MAX_STEPS}) to try: 4, 8. Empty: that of the run. "
        "Each multiplies the runs. Short runs measure a step as well as long ones.",
    ),
    prefix_input(
        "benchmark/WanStream", "Four small files: .json, .csv, .html and the chart as .png."
    ),
    io.Boolean.Input(
        "trace",
        default=False,
        optional=True,
        tooltip="On: writes a trace of visits and fetches for ui.perfetto.dev, some MB for "
        "each run of the benchmark, next to the report.",
    ),
    *(
        sockets.Run.Input(
            f"run_{letter}",
            optional=True,
            tooltip="From another Wan Sampler, or Run of Streamed Model, to compare. A run of Wan "
            "Sampler is repeated and varied like the first one.",
        )
        for letter in "bcd"
    ),
)
"""Inputs in a fixed order, because saved workflows depend on it."""


class WanStreamBenchmark(io.ComfyNode):
    """Report on a sampler's run, and on repetitions under other settings."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamBenchmark",
            display_name="Wan Benchmark",
            category="WanStream/benchmark",
            **search_aliases("benchmark, speed test, measure, profile, timing"),
            description="Reports seconds, bytes and memory of every step of a sampler's run, next "
            "to other runs, as JSON, CSV, an HTML page and a chart in the output folder. Can "
            "repeat the run under every setting that you name; the defaults only report the "
            "finished run.",
            inputs=[*BENCHMARK_INPUTS],
            outputs=[
                io.Image.Output(display_name="chart"),
                io.String.Output(display_name="summary"),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
            # Two equal benchmarks must both run.
            # Without this, ComfyUI's cache key has no node id. The hidden `unique_id` adds the id
            # for V1 nodes only.
            not_idempotent=True,
        )

    @classmethod
    def validate_inputs(
        cls,
        repeats: int | None = None,
        warmup: int | None = None,
        cooldown_s: float | None = None,
        policies: str | None = None,
        prefetch: str | None = None,
        steps: str | None = None,
        filename_prefix: str | None = None,
    ) -> bool:
        """Raise for settings that cannot run, before any node runs."""
        # `execute` checks linked values again.
        TrialTimes(**known(int | float, repeats=repeats, warmup=warmup, cooldown_s=cooldown_s))
        TrialMatrix.parse(policies or "", prefetch or "", steps or "")
        check_name(current_host().files, filename_prefix)
        return True

    @classmethod
    def execute(  # noqa: PLR0913 (one for each input)
        cls,
        run: SamplerRun | MeasuredModel,
        filename_prefix: str,
        *,
        warmup: int,
        repeats: int,
        cooldown_s: float,
        policies: str,
        prefetch: str,
        steps: str,
        trace: bool = False,
        **others: SamplerRun | MeasuredModel | None,
    ) -> io.NodeOutput:
        matrix = TrialMatrix.parse(policies, prefetch, steps)
        times = TrialTimes(warmup=warmup, repeats=repeats, cooldown_s=cooldown_s)
        # ComfyUI passes inputs in the order of the workflow file, but the report shows a, b, c, d.
        inputs = {"run": run, **dict(sorted(others.items()))}
        runs = named_runs(inputs, _titles(cls.hidden.prompt))
        host = current_host()
        files = ReportFiles(host.files.output_file(filename_prefix, "json"))
        traces = files.traces() if trace else None
        benchmark = Benchmark(title=TITLE, runs=runs, matrix=matrix, times=times, traces=traces)
        with files:
            report = measure(host, benchmark, node_id=cls.hidden.unique_id, on_report=files.save)
        return _output(report, files, benchmark.policies)


def _output(report: Report, files: ReportFiles, policies: Sequence[Policy]) -> io.NodeOutput:
    """Write all report files, and show the report on the node."""
    chart = files.finish(report)
    text = summary(report)
    shown = {
        TIMELINE: _median_runs(report),
        REPORT: [text],
        RANKING: [_ranked(rank, policies) for rank in ranking(report)],
        "text": [text],
        "images": [files.chart_preview()],
    }
    # IMAGE is [1, H, W, 3], float32 in 0..1.
    # `array` copies: torch warns about the read-only view from `asarray`.
    image = torch.from_numpy(np.array(chart)).float().div(255)
    return io.NodeOutput(image.unsqueeze(0), text, ui=shown)


def _ranked(rank: Rank, policies: Sequence[Policy]) -> dict[str, Any]:
    """Return a variant as JSON, with the node for its policy if the first sampler can run it."""
    # The variants of the first sampler come first, in the order of `policies`.
    is_of_first = rank.place < len(policies) and not rank.failed
    return {
        "name": rank.name,
        "step_s": rank.step_s,
        "memory": rank.memory,
        "failed": rank.failed,
        "policy": policy_node(policies[rank.place]) if is_of_first else None,
    }


class WanStreamModelRun(io.ComfyNode):
    """Native model run, for the benchmark."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamModelRun",
            display_name="Run of Streamed Model",
            category="WanStream/benchmark",
            **search_aliases("benchmark, ksampler, measure, timing"),
            description="The last run of a MODEL that streams, by KSampler or another sampler of "
            "ComfyUI, for Wan Benchmark. It can be reported and compared there, but not "
            "repeated.",
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="The MODEL of the sampler, from Load Diffusion Model (streamed) or "
                    "Stream Model.",
                ),
                io.Latent.Input(
                    "latent", tooltip="The LATENT of the sampler: this node then runs after it."
                ),
            ],
            outputs=[sockets.Run.Output(display_name="run")],
        )

    @classmethod
    def execute(cls, model: object, latent: Mapping[str, Any]) -> io.NodeOutput:
        run = current_host().native.model_run(model)
        # The input `latent` orders the graph: without it, this node might run before the sampler.
        return io.NodeOutput(MeasuredModel(**vars(run), latents=latent["samples"]))


def _titles(prompt: Any) -> dict[str, str]:
    """Return the node titles in a workflow by id, without untitled nodes."""
    # Hosts do not validate `_meta`, so it may contain any JSON.
    titles = {}
    for node_id, node in (prompt or {}).items():
        meta = node.get("_meta")
        title = meta.get("title") if isinstance(meta, dict) else None
        if isinstance(title, str) and title:
            titles[node_id] = _readable(title)
    return titles


def _readable(title: str) -> str:
    """Return the title on one line, without lone surrogates: UTF-8 files cannot contain them."""
    return " ".join(title.encode(errors="replace").decode().split())


def _median_runs(report: Report) -> list[dict[str, Any]]:
    """Return the median run for each variant as JSON."""
    # Without memory samples: ComfyUI sends this to every open page, and a run over hours has
    # many samples.
    runs = [variant.median_run for variant in report.variants if variant.median_run is not None]
    return [replace(timeline, memory=()).to_dict() for timeline in runs]
