"""Pages of docs/ whose tables are written from the results."""
