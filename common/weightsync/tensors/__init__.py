"""Tensors as data: manifests, boxes, the stream of bytes in which a checkpoint crosses, digests, native copies."""
