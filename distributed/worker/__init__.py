"""Worker side of a distributed run: groups, rendezvous, split lanes and context parallelism."""
