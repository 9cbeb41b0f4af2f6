"""The engine side, without any one engine: the drivers of a front end and of its ranks."""
