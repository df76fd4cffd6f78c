"""The sentence on what limits a run."""

from __future__ import annotations

import pytest

from wanstream.tools.comfyui import PACK
from wanstream.tools.frontend import Frontend

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

VERDICT = f"""async records => {{
    const {{ verdictText, waitOf }} = await import('/extensions/{PACK}/overlay/figures.mjs')
    return records.map(([stall_s, stall_on_read_s, gain]) => {{
        const first = {{ wall_s: 90, stall_s: 80, stall_on_read_s: 80 }}
        const second = {{ wall_s: 10, stall_s, stall_on_read_s }}
        return verdictText(waitOf({{ records: [first, second] }}), gain && {{ gain }})
    }})
}}"""


def test_a_run_waits_for_the_disk_or_the_bus_or_computes(frontend: Frontend) -> None:
    disk, bus, most, compute = frontend.page.evaluate(VERDICT, [[6, 5], [2, 1], [10, 10], [0.3, 0]])
    assert disk.startswith("Waits 50 % for the disk. More blocks ")
    assert disk.endswith(" up to 2.0 × as fast.")
    assert bus.startswith("Waits 20 % for the bus. More blocks ")
    assert bus.endswith(" up to 1.3 × as fast.")
    assert most.endswith(" up to 100.0 × as fast."), "a finite number"
    assert compute == "Limited by computing: 3.0 % of the time waits for weights."


def test_a_simulated_gain_takes_the_place_of_the_most_possible_one(frontend: Frontend) -> None:
    disk, bus, best = frontend.page.evaluate(VERDICT, [[6, 5, 1.52], [2, 1, 1.06], [2, 1, 1.04]])
    assert disk == "Waits 50 % for the disk. Auto policy: 1.5 × as fast, simulated."
    assert bus == "Waits 20 % for the bus. Auto policy: 1.1 × as fast, simulated."
    assert best == "Waits 20 % for the bus. In the free memory no policy is faster."
