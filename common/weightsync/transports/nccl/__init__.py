"""Broadcast to every rank of every engine: NCCL on GPUs, gloo elsewhere."""
