"""Case variants: every measured strategy for offloading two experts, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from wanstream.offload.core.pages import MMAP_BYTES, TRIM_BYTES
from wanstream.schema import OffloadPolicy

Kind = Literal["wanstream", "resident", "mmap", "swap", "group", "accelerate"]

CHUNK_TOKENS = 8192

HEAP_ON_DEMAND = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Without this, glibc allocates diffusers' placeholders on the heap, where activations touch all
their pages."""

KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(TRIM_BYTES), "MALLOC_MMAP_THRESHOLD_": str(MMAP_BYTES)}
"""WanStream's malloc settings, applied to a peer so that their gain does not count as a streaming
gain."""


@dataclass(frozen=True, kw_only=True)
class CaseVariant:
    """One offloading strategy with settings."""

    name: str
    title: str
    kind: Kind
    policy: OffloadPolicy | None = None
    """WanStream's policy. None for peers."""
    direct: bool | None = None
    """True for WanStream to read past the page cache. None for the default."""
    storage: Literal["as stored", "fp8"] = "as stored"
    level: Literal["block_level", "leaf_level"] = "block_level"
    """Level for diffusers' group offloading."""
    to_disk: bool = False
    """True for a peer that stores weights in files written by itself. False: in RAM."""
    stream: bool = False
    record_stream: bool = False
    layerwise_fp8: bool = False
    """True to store the weights in fp8 without scales, by diffusers' layerwise casting."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def prepares(self) -> bool:
        """True if the variant writes files before its first run."""
        return self.to_disk


def _streamed(
    name: str, title: str, policy: OffloadPolicy, *, direct: bool | None = True
) -> CaseVariant:
    return CaseVariant(
        name=name, title=f"WanStream, {title}", kind="wanstream", policy=policy, direct=direct
    )


def half_swapped(blocks: int) -> OffloadPolicy:
    """Return a policy that streams every second block."""
    return OffloadPolicy.block_swap(blocks // 2)


def wanstream_variants(blocks: int) -> list[CaseVariant]:
    """Return WanStream's variants for experts with this many blocks."""
    return [
        _streamed("layerwise", "layerwise from the file", OffloadPolicy.layerwise()),
        _streamed(
            "layerwise-buffered",
            "layerwise through the page cache",
            OffloadPolicy.layerwise(),
            direct=False,
        ),
        _streamed("half", "half of the blocks resident", half_swapped(blocks)),
        _streamed("pinned", "layerwise from RAM", OffloadPolicy.layerwise(source="pinned")),
        _streamed("wanstream-resident", "resident", OffloadPolicy.resident()),
    ]


def chunked_variant() -> CaseVariant:
    """Return WanStream's variant with the smallest memory for large videos."""
    policy = replace(OffloadPolicy.layerwise(source="pinned"), chunk_tokens=CHUNK_TOKENS)
    return CaseVariant(
        name="chunked",
        title=f"WanStream, layerwise from RAM, {CHUNK_TOKENS} tokens at once",
        kind="wanstream",
        policy=policy,
    )


def fp8_variants() -> list[CaseVariant]:
    """Return the variants with fp8 weights. Their latents differ from bf16 latents."""
    ours = CaseVariant(
        name="layerwise-fp8",
        title="WanStream, layerwise from RAM, quantised to fp8 per row",
        kind="wanstream",
        policy=OffloadPolicy.layerwise(source="pinned"),
        storage="fp8",
    )
    block = CaseVariant(
        name="group-block-fp8",
        title="diffusers group offload, block level, layerwise casting to fp8",
        kind="group",
        stream=True,
        record_stream=True,
        layerwise_fp8=True,
    )
    resident = CaseVariant(
        name="resident-fp8",
        title="resident, layerwise casting to fp8",
        kind="resident",
        layerwise_fp8=True,
    )
    return [ours, block, resident]


RESIDENT = CaseVariant(name="resident", title="resident (disable_mmap=True)", kind="resident")
KEPT_RESIDENT = replace(
    RESIDENT,
    name="resident-kept",
    title="resident, same malloc settings as WanStream",
    environment=KEPT_MEMORY,
)
SWAP = CaseVariant(name="swap", title="whole experts, one at a time", kind="swap")
CPU_OFFLOAD = CaseVariant(name="cpu-offload", title="accelerate cpu_offload", kind="accelerate")

DISK_PEERS = [
    CaseVariant(name="mmap", title="memory-mapped (from_pretrained as it is)", kind="mmap"),
    CaseVariant(
        name="group-block-disk",
        title="diffusers group offload, block level, disk",
        kind="group",
        to_disk=True,
    ),
    CaseVariant(
        name="group-leaf-disk",
        title="diffusers group offload, leaf level, disk",
        kind="group",
        level="leaf_level",
        to_disk=True,
    ),
    CaseVariant(
        name="disk-offload", title="accelerate disk_offload", kind="accelerate", to_disk=True
    ),
]

HEAP_PEERS = [
    replace(
        peer,
        name=f"{peer.name}-heap",
        title=f"{peer.title}, MALLOC_MMAP_THRESHOLD_",
        environment=HEAP_ON_DEMAND,
    )
    for peer in DISK_PEERS
    if peer.kind == "group"
]

DEVICE_PEERS = [
    replace(CPU_OFFLOAD, title="accelerate cpu_offload"),
    *(
        CaseVariant(
            name=f"group-{level.removesuffix('_level')}{'-record' if record else ''}",
            title=f"diffusers group offload, {level.replace('_', ' ')}, "
            f"stream{', record_stream' if record else ''}",
            kind="group",
            level=level,
            stream=True,
            record_stream=record,
        )
        for level in ("block_level", "leaf_level")
        for record in (False, True)
    ),
]


def all_variants(blocks: int) -> dict[str, CaseVariant]:
    """Return every variant by name, for experts with this many blocks."""
    variants = [
        RESIDENT,
        KEPT_RESIDENT,
        *wanstream_variants(blocks),
        chunked_variant(),
        *fp8_variants(),
        SWAP,
        CPU_OFFLOAD,
        *DISK_PEERS,
        *HEAP_PEERS,
        # The first device peer is `CPU_OFFLOAD` under another title.
        *DEVICE_PEERS[1:],
    ]
    return {variant.name: variant for variant in variants}
