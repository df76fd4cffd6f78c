"""API-format workflows and their nodes: description, inputs, rules and order.

Nothing here depends on a host. Another part of this package runs the nodes.
"""
