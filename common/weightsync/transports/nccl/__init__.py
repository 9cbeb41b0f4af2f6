"""The nccl transport: broadcast to every rank of every engine, with NCCL on GPUs and gloo elsewhere."""
