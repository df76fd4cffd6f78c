"""L5: other processes. Ray places workers and watches them, torch.distributed carries their tensors."""
