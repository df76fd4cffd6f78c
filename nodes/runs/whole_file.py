"""Files in the output folder that appear only when complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path, error: type[OSError], *, remedy: str = "") -> Iterator[Path]:
    """Yield the path to a file that is renamed to `path` at the end of the block.

    A killed process leaves a .part file, and an error leaves nothing.

    Raises:
        error: an OSError in the block or while renaming, with its `errno` and `remedy`.
    """
    # In the same folder, because a rename cannot cross file systems.
    unfinished = path.with_name(f"{path.name}.part")
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as err:
        raise error(err.errno, f"{path} could not be written: {err.strerror}{remedy}") from err
    finally:
        # After `replace`, the file no longer exists.
        unfinished.unlink(missing_ok=True)
