"""Driver side of a distributed run: scheduling, worker groups, results."""
