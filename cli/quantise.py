"""`wanstream quantise`: writes experts in int8 ConvRot."""

from __future__ import annotations

import sys
from pathlib import Path

from ..offload import CheckpointFileError
from ..schema import format_size
from ..wan import open_expert, write_int8
from .arguments import DONE, FAILED, INVALID, error_text
from .options import QuantiseOptions

ENDING = "int8_convrot"


def quantise(options: QuantiseOptions) -> int:
    """Write a file for each expert, print its path, and return the exit code."""
    outputs = [_output(path, options.out) for path in options.experts]
    for path, output in zip(options.experts, outputs, strict=True):
        if outputs.count(output) > 1:
            print(
                f"{path}: another expert would be written to {output} too: rename one, or omit --out", file=sys.stderr
            )
            return INVALID
        if output.exists():
            print(f"{path}: {output} exists already: remove it, or choose another folder with --out", file=sys.stderr)
            return INVALID
    for path, output in zip(options.experts, outputs, strict=True):
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            write_int8(open_expert(path), output, on_matrix=_show_progress)
        except (CheckpointFileError, OSError) as err:
            print(f"failed: {error_text(err)}", file=sys.stderr)
            return FAILED
        print(f"{output}  {format_size(output.stat().st_size)}")
    return DONE


def _output(path: Path, folder: Path | None) -> Path:
    # A diffusers folder is named "transformer"; the pipeline that it belongs to says more.
    whole = path.absolute()  # not resolved: a link into a cache of downloads would give the name of a blob
    name = f"{whole.parent.name}_{whole.name}" if whole.is_dir() else whole.stem
    return (whole.parent if folder is None else folder) / f"{name}_{ENDING}.safetensors"


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {total} matrices", end="\n" if done == total else "", file=sys.stderr, flush=True)
