"""Batch files read before they are trusted: names, kinds, and the journal head."""
