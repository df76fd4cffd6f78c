"""What only those who work on the pack need: a real ComfyUI server, its frontend in a browser, and the builder of the
canvas workflows. No part of the installed package.
"""
