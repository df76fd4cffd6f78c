"""docs/scaling.md and its figures: what the planner says about 1 to 64 GPUs, beside what others have measured."""
