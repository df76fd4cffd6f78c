"""Development tools: a real ComfyUI server, its frontend in a browser, builders of workflows and locales."""
