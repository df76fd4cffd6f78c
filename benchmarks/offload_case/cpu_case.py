"""Case `cpu`: files, order of runs, and result."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from ..record import record
from .linux import NoMemoryLimitError, limited_group
from .session import DISTURBED, Planned, Session, Settings
from .shapes import SHAPES
from .summary import summarise
from .variants import (
    CPU_OFFLOAD,
    DISK_PEERS,
    HEAP_PEERS,
    KEPT_RESIDENT,
    RESIDENT,
    SWAP,
    wanstream_variants,
)

MAIN = ("resident", "resident-kept", "layerwise", "half")
LIMITED_MAIN = ("layerwise",)


def prepare(work: Path, shape: str) -> None:
    """Write all files in the case: experts, and peers' own files.

    They take about 23 GB for the shape `cpu`.
    """
    session = Session(
        work / "sessions" / "prepare.jsonl", Settings(shape=shape, work=work.resolve())
    )
    session.write_experts()
    for peer in DISK_PEERS:
        session.prepare(peer.name)


def run_case(chosen: argparse.Namespace) -> None:
    """Make the missing runs, then write the result of all runs."""
    case: str = chosen.command
    shape: str = chosen.shape
    limit = None if chosen.limit_gib is None else round(chosen.limit_gib * 2**30)
    if limit is not None and not _limit_is_available(limit):
        return
    file = chosen.work / "sessions" / f"{case}.jsonl"
    if chosen.fresh:
        file.unlink(missing_ok=True)
        # Includes the machine measurements, as the machine may have been busy then.
        shutil.rmtree(file.with_suffix(""), ignore_errors=True)
    settings = Settings(
        shape=shape,
        work=chosen.work.resolve(),
        threads=chosen.threads,
        limit_bytes=limit,
    )
    session = Session(file.resolve(), settings)
    session.write_experts()
    rounds = planned_rounds(
        blocks=SHAPES[shape].expert.layers,
        repetitions=chosen.repetitions,
        limited=limit is not None,
        only=chosen.only,
    )
    session.make(rounds, retries=chosen.retries, minutes=chosen.minutes)
    figures = result_figures(session, settings)
    for name, row in figures["variants"].items():
        print(name, row)
    if not chosen.no_result and shape == "cpu":
        print(
            record(
                f"offload-{case}", method=method(settings), figures=figures, folder=chosen.results
            )
        )


def planned_rounds(
    *, blocks: int, repetitions: int, limited: bool, only: list[str] | None = None
) -> list[list[Planned]]:
    """Return the rounds. Each contains the main variants, and a share of the other ones.

    With a limit, each round also contains the resident model without it, as reference for ratios.
    """
    ours = wanstream_variants(blocks)
    peers = [*DISK_PEERS, *(HEAP_PEERS if limited else []), CPU_OFFLOAD, SWAP]
    every = [RESIDENT, KEPT_RESIDENT, *ours, *peers]
    main = LIMITED_MAIN if limited else MAIN
    names = [variant.name for variant in every if only is None or variant.name in only]
    others = [
        name for name in names if name not in main and not (limited and name in UNLIMITED_ONLY)
    ]
    rounds = []
    for repetition in range(repetitions):
        free = (
            [Planned(variant="resident", repetition=repetition)]
            if limited and "resident" in names
            else []
        )
        again = [
            Planned(variant=name, repetition=repetition, limited=limited)
            for name in main
            if name in names
        ]
        # The others run once each, and the rounds take about the same time.
        once = [Planned(variant=name, limited=limited) for name in others[repetition::repetitions]]
        rounds.append([*free, *again, *once])
    return rounds


UNLIMITED_ONLY = ("resident-kept", "pinned", "wanstream-resident")
"""Variants that keep all weights in RAM by design. A run inside a limit would measure nothing."""


def result_figures(session: Session, settings: Settings) -> dict[str, Any]:
    """Return the rows for all variants and the case size."""
    shape = SHAPES[settings.shape]
    runs = session.runs()
    return {
        "tokens": shape.tokens,
        "blocks": shape.expert.layers,
        "steps": shape.steps,
        "switch_step": shape.switch_step,
        "expert_gb": round(shape.expert_bytes / 1e9, 3),
        "streamed_gb": round(shape.streamed_bytes / 1e9, 3),
        "limit_gib": None if settings.limit_bytes is None else settings.limit_bytes / 2**30,
        "variants": summarise(runs, switch_step=shape.switch_step),
    }


def method(settings: Settings) -> str:
    """Describe the measurement method, as stored in the result."""
    shape = SHAPES[settings.shape]
    limit = (
        ""
        if settings.limit_bytes is None
        else (
            f" Runs marked (limited) had {settings.limit_bytes / 2**30:g} GiB of anonymous memory "
            "and page cache together (memory control group); the resident model ran beside them "
            "without a limit."
        )
    )
    return (
        f"two experts of {shape.expert.layers} blocks, {shape.expert.heads} heads x 128, "
        f"feed-forward {shape.expert.ffn_dim}, random bf16 weights in {shape.shards} files each; "
        f"{shape.tokens} tokens, {shape.text_tokens} text tokens, {shape.steps} Euler steps with "
        f"guidance (two lanes), switch after step {shape.switch_step}; {settings.threads} threads, "
        "inference mode; every run in a process of its own, its files dropped from the page cache "
        "before (checked with mincore); times start after the imports; peak_rss is VmHWM, "
        "peak_anonymous was sampled every 50 ms from outside, read is what the disk gave "
        "(/proc/self/io), moved is what the engine counted; medians of the runs that were not "
        f"disturbed (less than {DISTURBED:.0%} of the machine's processor time went to other "
        "processes or to other machines), made in turns; ratios are to the resident model "
        f"(disable_mmap=True) of the same session.{limit}"
    )


def _limit_is_available(limit_bytes: int) -> bool:
    try:
        with limited_group(limit_bytes):
            return True
    except NoMemoryLimitError as err:
        line = "*" * 100
        print(f"{line}\nSKIPPED: nothing was run inside a memory limit.\n{err}\n{line}")
        return False
