"""Files of a batch that are read before they are trusted: their names, their kinds, and the head of the journal."""
