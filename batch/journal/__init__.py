"""Batch journal: the state of every row, in an SQLite file."""
