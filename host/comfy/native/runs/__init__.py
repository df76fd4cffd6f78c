"""Runs of streamed native models and text encoders."""
