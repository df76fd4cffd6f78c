"""`wanstream quantise`: writes experts in int8 ConvRot."""

from __future__ import annotations

import sys
from pathlib import Path

from ..offload.formats import CheckpointFileError
from ..schema.text import error_text, format_size
from ..wan.checkpoint import open_expert, write_int8
from .arguments import DONE, FAILED, ArgumentError
from .options import QuantiseOptions
from .terminal import print_note

ENDING = "int8_convrot"


def quantise(options: QuantiseOptions) -> int:
    """Write a file for each expert, print its path, and return the exit code.

    Raises ArgumentError.
    """
    outputs = [_output(path, options.out) for path in options.experts]
    # All outputs are checked before the first one is written.
    for path, output in zip(options.experts, outputs, strict=True):
        if outputs.count(output) > 1:
            raise ArgumentError(
                f"{path}: another expert would be written to {output} too: rename one, or omit "
                "--out"
            )
        if output.exists():
            raise ArgumentError(
                f"{path}: {output} exists already: remove it, or choose another folder with --out"
            )
    for path, output in zip(options.experts, outputs, strict=True):
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            write_int8(open_expert(path), output, on_matrix=_show_progress)
        except (CheckpointFileError, OSError) as err:
            print_note(f"failed: {error_text(err)}")
            return FAILED
        print(f"{output}  {format_size(output.stat().st_size)}")
    return DONE


def _output(path: Path, folder: Path | None) -> Path:
    # A diffusers folder is named "transformer". The name of the pipeline folder says more. Not
    # resolved: a link into a download cache would give the name of a blob.
    whole = path.absolute()
    name = f"{whole.parent.name}_{whole.name}" if whole.is_dir() else whole.stem
    return (whole.parent if folder is None else folder) / f"{name}_{ENDING}.safetensors"


def _show_progress(done: int, total: int) -> None:
    # A log file would contain every update.
    if sys.stderr.isatty():
        print(
            f"\r{done} of {total} matrices",
            end="\n" if done == total else "",
            file=sys.stderr,
            flush=True,
        )
