"""docs/performance.md and its figures, made from the files of benchmarks/results."""
