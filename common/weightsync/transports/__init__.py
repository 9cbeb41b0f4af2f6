"""Bytes across: one file a transport, each with a trainer end and an engine end (see `base`)."""
