"""The control messages between a trainer and the ranks of engines during a push, the same for every transport."""
