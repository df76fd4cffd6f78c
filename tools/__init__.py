"""Development tools: real ComfyUI server, frontend in a browser, workflow and locale builders."""
