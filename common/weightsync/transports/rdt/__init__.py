"""The rdt transport: ranks in Ray actors READ from the trainer's arena over Ray Direct Transport."""
