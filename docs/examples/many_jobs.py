"""Make many videos: queue all jobs, then download each video when its job ends.

A failed job does not stop the others.

python many_jobs.py workflows/api/t2v.json videos "a red fox in snow" "a kite over dunes"
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

from comfy_http import FailedError, PromptRefusedError, download, queue, read_workflow, wait


def main(workflow: str, folder: str, *texts: str) -> int:
    """Make one video per text; return the number of missing videos."""
    base = read_workflow(workflow)
    jobs = {}
    missing = 0
    for number, text in enumerate(texts):
        prompt = copy.deepcopy(base)
        prompt["text"]["inputs"]["positive"] = text
        prompt["sampler"]["inputs"]["seed"] = number
        prompt["save"]["inputs"]["filename_prefix"] = f"video/job_{number:04}"
        try:
            jobs[queue(prompt)] = text
        except PromptRefusedError as err:
            print(f"{text}: {err}", file=sys.stderr)
            missing += 1

    # Jobs run one after the other in the order of the queue; the experts stay open between them.
    for prompt_id, text in jobs.items():
        try:
            for file in download(wait(prompt_id), Path(folder)):
                print(f"{text}: {file}")
        except FailedError as err:
            print(f"{text}: {err}", file=sys.stderr)
            missing += 1
    return missing


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    try:
        sys.exit(main(*sys.argv[1:]) > 0)
    except (OSError, ValueError) as err:
        sys.exit(f"many_jobs: {err}")
