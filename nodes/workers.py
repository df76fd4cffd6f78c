"""Naming the workers that compute a run: how many, how they share it, and where they are."""

from __future__ import annotations

from typing import Any

from ..host import host, io, search_words
from ..host.kept_workers import check_ray, gpus_of
from . import sockets
from .expert_inputs import said_once
from .workers_inputs import workers_inputs, workers_ref, workers_refusal


class WanStreamWorkers(io.ComfyNode):
    """Names workers; they start when a sampler first asks for them, and stay for the next run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamWorkers",
            display_name="Wan Workers (many GPUs)",
            category="WanStream/offload",
            **search_words("multigpu", "multi gpu", "two gpus", "ray", "distributed", "parallel", "ulysses"),
            description="Lets several GPUs, of this machine or of a Ray cluster, compute what Wan Sampler runs: one "
            "video sooner, or the videos of a batch at the same time. The result is the same. Needs Ray: pip install "
            "ray.",
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
    ) -> bool | str:
        degrees = {"data": data, "stage": stage, "cfg": cfg, "ring": ring, "ulysses": ulysses}
        gpus = gpus_of(host.device())
        return said_once(workers_refusal(gpus=gpus, count=count, layout=layout, **degrees, cluster=cluster))

    @classmethod
    def execute(
        cls,
        threads: int = 0,
        max_restarts: int = 3,
        timeout_s: float = 300.0,
        **settings: Any,
    ) -> io.NodeOutput:
        life = {"threads": threads, "max_restarts": max_restarts, "timeout_s": timeout_s}
        ref = workers_ref(gpus=gpus_of(host.device()), **settings, **life)
        # Asked here so that what is missing is said on the node that wants it.
        check_ray(ref)
        return io.NodeOutput(ref)
