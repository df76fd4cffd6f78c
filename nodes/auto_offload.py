"""Leaving it to the planner how much memory the experts take."""

from __future__ import annotations

from ..host import io, search_words
from ..plan import AutoOffload, Budgets
from . import sockets

GB = 1e9


class WanStreamAutoOffload(io.ComfyNode):
    """Asks for the policy that is predicted to be the fastest within two budgets."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamAutoOffload",
            display_name="Wan Auto Offload",
            category="WanStream/offload",
            **search_words("low vram", "vram", "automatic", "offload"),
            description="Simulates the run for this machine under every policy that fits, takes the fastest, and "
            "corrects itself once after the first step. The first run ever measures the machine, which takes some "
            "seconds.",
            inputs=[
                io.Float.Input(
                    "vram_budget_gb",
                    default=0.0,
                    min=0.0,
                    max=1000.0,
                    step=0.5,
                    tooltip="Device memory in GB for weights and for what is computed in, together. 0: what is free, "
                    "less what the host reserves. Less memory means more copies per step, which cost time only where "
                    "the bus or the disk is slower than the computing.",
                ),
                io.Float.Input(
                    "ram_budget_gb",
                    default=0.0,
                    min=0.0,
                    max=1000.0,
                    step=0.5,
                    tooltip="RAM in GB for blocks that are not read from disk in every step. 0: up to half of all RAM, "
                    "if it is free. What does not fit is read from the file in every step, which costs disk time.",
                ),
            ],
            outputs=[sockets.Policy.Output(display_name="policy")],
        )

    @classmethod
    def execute(cls, vram_budget_gb: float, ram_budget_gb: float) -> io.NodeOutput:
        budgets = Budgets(vram_bytes=_bytes(vram_budget_gb), ram_bytes=_bytes(ram_budget_gb))
        return io.NodeOutput(AutoOffload(budgets=budgets))


def _bytes(gigabytes: float) -> int | None:
    """A budget in bytes; None leaves it to the planner."""
    return int(gigabytes * GB) if gigabytes else None
