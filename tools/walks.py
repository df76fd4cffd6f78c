"""Stack in a run when a block gets its weights: sampler node to block, and block to its visit.

    python -m wanstream.tools.walks

Runs the first workflow on the test model on the CPU, and takes the stack when the first block is
bound.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ..cli import main
from ..offload.engine.binding import BlockBinding

ROOT = Path(__file__).parent.parent
BLOCKS = "_through_blocks"
"""Function that passes lanes through the blocks."""


def walk(stack: list[CodeType], first: str) -> list[str]:
    """Return this project's frames from `first` on, as `file:function`."""
    ours = [code for code in stack if Path(code.co_filename).is_relative_to(ROOT)]
    names = [
        f"{Path(code.co_filename).relative_to(ROOT).as_posix()}:{_name(code)}" for code in ours
    ]
    start = next(at for at, name in enumerate(names) if name.endswith(first))
    return names[start:]


def _name(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)


def describe(title: str, frames: list[str]) -> str:
    """Return the frames below a title with the numbers of frames, files and closures."""
    files = {frame.split(":")[0] for frame in frames}
    closures = sum("<locals>" in frame for frame in frames)
    head = f"{title}: {len(frames)} frames in {len(files)} files, {closures} closures"
    return "\n".join((head, *(f"    {frame}" for frame in frames)))


def record() -> list[CodeType]:
    """Run a workflow and return the stack when the first block is bound, outermost first."""
    found: list[CodeType] = []
    bind = BlockBinding.bind

    def recording(*arguments: Any) -> None:
        if not found:
            # The original replaces this wrapper, so the wrapper's own frame is left out below.
            codes = [bind.__code__]
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                codes.append(frame.f_code)
                frame = frame.f_back
            # The text encoder streams too.
            if any(code.co_name == BLOCKS for code in codes):
                # Code objects are kept rather than frames, because frames would keep the tensors.
                found.extend(codes)
        bind(*arguments)

    BlockBinding.bind = recording  # type: ignore[assignment, method-assign]
    workflow = str(ROOT / "workflows" / "api" / "t2v.json")
    small = ["latent.width=64", "latent.height=64", "latent.frames=5", "sampler.steps=2"]
    changes = [word for value in small for word in ("--set", value)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            main(["make-test-model", folder, "--workflow", workflow])
            main(
                ["run", workflow, "--models", folder, "--out", folder, "--device", "cpu", *changes]
            )
    finally:
        BlockBinding.bind = bind  # type: ignore[method-assign]
    return found[::-1]


if __name__ == "__main__":
    stack = record()
    frames = walk(stack, ".execute")
    block = next(at for at, frame in enumerate(frames) if frame.endswith(BLOCKS))
    print(describe("LATENT to the first block", frames[: block + 1]))
    print(describe("hops of a visit", frames[block + 1 :]))
