"""The same two experts, the same inputs and the same loop, run by WanStream and by every other way to offload them."""
