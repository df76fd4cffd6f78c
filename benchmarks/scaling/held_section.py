"""What fetches cost that are held back while workers exchange tokens, and what they spare: arithmetic of one block."""

from __future__ import annotations

from dataclasses import dataclass

from wanstream.plan import Mesh
from wanstream.plan.fleet_exchange import gather_exchange, lane_exchange

from ..performance.markdown import number, table
from .setups import SETUPS, Setup, job_of

SIZES = ("832x480x17", "832x480x81", "1280x720x81")
COUNTS = (2, 4, 8)
LANES = 2


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block on one worker of a cell with Ulysses. Seconds."""

    compute_s: float
    """Of all lanes."""
    exchange_s: float
    """Of all lanes, alone on its wires."""
    rest_s: float
    """Computing behind the last self-attention."""
    fetch_s: float
    """Of the next block: over the bus, or gathered where workers have wires of their own."""
    bus_s: float
    """The whole next block over the bus."""

    @property
    def first_s(self) -> float:
        """Both at the same time, and exchanges go first where they meet."""
        return max(self.compute_s + self.exchange_s, self.exchange_s + self.fetch_s)

    @property
    def halved_s(self) -> float:
        """Both at the same time, and each gets half of the wires where they meet."""
        later_s = min(self.exchange_s, self.fetch_s)
        return max(self.compute_s + self.exchange_s + later_s, self.exchange_s + self.fetch_s)

    @property
    def held_s(self) -> float:
        """The fetch begins behind the last self-attention, and the next block waits for it."""
        return self.compute_s + self.exchange_s + max(0.0, self.fetch_s - self.rest_s)


def held_section() -> str:
    """A table per setup: a block with fetches that are held back and with fetches that are not."""
    parts = [
        "## Fetches that are held back (simulated)\n",
        "`hold_fetches` keeps fetches of weights out of self-attention, in which workers exchange tokens. This is what "
        f"one block takes on one cell with Ulysses, {LANES} lanes and one block ahead, in milliseconds, by arithmetic. "
        "Not held back: from exchanges that go first wherever both want the wires, to both getting half of them. Held "
        "back: the fetch of the next block begins behind the last self-attention, and what the rest of the block does "
        "not hide is waited for.\n",
    ]
    head = ("video", "GPUs", "computing", "exchanges", "rest", "fetch", "not held back", "held back")
    for setup in SETUPS:
        rows = [_row(block_of(setup, size, count), size, count) for size in SIZES for count in COUNTS]
        parts += [f"{setup.name}, {_way(setup)}:\n", table(head, rows)]
    parts.append(_conclusion())
    return "\n".join(parts)


def block_of(setup: Setup, size: str, count: int) -> Block:
    """A block of the page's model on one of `count` GPUs that share the tokens."""
    job, mesh, machine = job_of(size, lanes=LANES), Mesh(ulysses=count), setup.machine
    expert, tokens, rate = job.expert, job.tokens, machine.flops_per_s * count
    # Four projections, scores, and what is made of them.
    self_attention = 8 * tokens * expert.width**2 + 4 * tokens**2 * expert.width
    lane = expert.block_flops(tokens)
    assert machine.h2d_bytes_per_s is not None
    together = setup.links.ram_bytes_per_s / count
    bus_s = job.stored_bytes / min(machine.h2d_bytes_per_s, together)
    shares_bus = setup.links.shares_bus
    return Block(
        compute_s=LANES * lane / rate,
        exchange_s=LANES * lane_exchange(job, mesh, setup.links).seconds,
        rest_s=(lane - self_attention) / rate,
        fetch_s=bus_s if shares_bus else gather_exchange(mesh, setup.links, job.stored_bytes).seconds,
        bus_s=bus_s,
    )


def _way(setup: Setup) -> str:
    if setup.links.shares_bus:
        return "whole weights over the bus that exchanges pass too"
    return "weights gathered over the wires that exchanges pass too"


def _row(block: Block, size: str, count: int) -> tuple[str, ...]:
    free = f"{_ms(block.first_s)} to {_ms(block.halved_s)}"
    times = (block.compute_s, block.exchange_s, block.rest_s, block.fetch_s)
    return (size, str(count), *map(_ms, times), free, _ms(block.held_s))


def _conclusion() -> str:
    beside = next(setup for setup in SETUPS if not setup.links.shares_bus)
    block = block_of(beside, SIZES[1], COUNTS[-1])
    return (
        "Where the rest of a block is long enough, holding back costs nothing, and spares at most the shorter one of "
        "both; where it is not, it costs what is missing, and leaves the wires idle meanwhile. So it is off unless it "
        f"is asked for. Whole weights on {beside.name} come over another wire than tokens ({_ms(block.bus_s)} ms for a "
        "block, with eight GPUs at once): nothing can be spared there. That attention itself may be slower beside "
        "copies is not in these figures.\n"
    )


def _ms(seconds: float) -> str:
    return number(1000 * seconds, 1)
