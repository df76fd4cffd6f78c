"""Nodes for native models: MODELs and CLIPs from any family, with streamed blocks."""
