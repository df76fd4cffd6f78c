"""Files of the archive that goes to the Comfy Registry."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pathspec import GitIgnoreSpec

ROOT = Path(__file__).parents[2]


def archived_files() -> set[str]:
    """Return the files that `comfy node pack` archives: those of git without `.comfyignore`'s."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    patterns = (ROOT / ".comfyignore").read_text(encoding="ascii").splitlines()
    ignored = GitIgnoreSpec.from_lines(patterns)
    return {name for name in listed if not ignored.match_file(name)}
