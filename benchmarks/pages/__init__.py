"""Pages in docs/ with tables written from the results."""
