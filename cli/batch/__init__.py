"""`wanstream batch`: many videos from one workflow, resumable, in this process or on a ComfyUI server."""
