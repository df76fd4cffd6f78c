"""Make a video from your own image: upload it, set its name in the workflow, and run the workflow.

python upload_image.py workflows/api/i2v.json portrait.png videos
"""

from __future__ import annotations

import sys
from pathlib import Path

from comfy_http import download, queue, read_workflow, upload, wait


def main(workflow: str, image: str, folder: str) -> None:
    prompt = read_workflow(workflow)
    prompt["image"]["inputs"]["image"] = upload(Path(image))
    for file in download(wait(queue(prompt)), Path(folder)):
        print(file)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (OSError, ValueError) as err:
        sys.exit(f"upload_image: {err}")
