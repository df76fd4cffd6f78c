"""L1: observes. Never decides."""
