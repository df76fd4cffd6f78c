"""Worker side of a distributed run: process groups, rendezvous, lanes and tokens shared."""
