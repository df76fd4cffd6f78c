"""L3: knows Wan."""
