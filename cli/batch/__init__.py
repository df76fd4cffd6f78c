"""`wanstream batch`: many videos from one workflow, resumable, in this process or on ComfyUI servers."""
