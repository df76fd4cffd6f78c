"""Measurements of a Wan block on a device: its rate, its times by part, and the faster arithmetic."""
