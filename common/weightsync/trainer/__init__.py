"""The trainer: the `Sender`, and what it is made of."""
