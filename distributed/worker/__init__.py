"""Worker side of a distributed run: process groups, rendezvous, split lanes and context parallelism."""
