"""Make one video: queue a workflow, wait, download the file, and print the time of each step.

python one_job.py workflows/api/t2v.json videos
"""

from __future__ import annotations

import sys
from pathlib import Path

from comfy_http import download, queue, read_workflow, wait


def main(workflow: str, folder: str) -> None:
    prompt = read_workflow(workflow)
    prompt["sampler"]["inputs"]["seed"] = 7
    prompt["text"]["inputs"]["positive"] = "A lighthouse in a storm, waves break against the rocks"

    entry = wait(queue(prompt))
    for file in download(entry, Path(folder)):
        print(file)

    # There may be no timeline if the server had the result in its cache.
    for timeline in entry["outputs"].get("sampler", {}).get("wanstream_timeline", []):
        for step in timeline["steps"]:
            print(
                f"step {step['index']} ({step['expert']}): {step['wall_s']:.2f} s, "
                f"{step['stall_s']:.2f} s of it stall"
            )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (OSError, ValueError) as err:
        sys.exit(f"one_job: {err}")
