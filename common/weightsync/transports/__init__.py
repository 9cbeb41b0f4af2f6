"""Transports move the bytes of a push from the trainer's arena to the ranks of engines; `base` has the interfaces."""
