"""What a trainer and an engine's ranks say to each other during a push, whichever transport moves the bytes."""
