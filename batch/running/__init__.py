"""Rows on their way through the backends: the queue, and a runner for each backend."""
