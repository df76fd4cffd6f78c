"""Files in the archive for the Comfy Registry."""

import subprocess
from pathlib import Path

from pathspec import GitIgnoreSpec

ROOT = Path(__file__).parents[2]


def archived_files() -> set[str]:
    """Return the files archived by `comfy node pack`: git's files without `.comfyignore`'s."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    patterns = (ROOT / ".comfyignore").read_text(encoding="ascii").splitlines()
    ignored = GitIgnoreSpec.from_lines(patterns)
    return {name for name in listed if not ignored.match_file(name)}
