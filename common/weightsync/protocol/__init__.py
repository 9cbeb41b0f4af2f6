"""What crosses between processes, and the rules for it: messages, states, names, the key. No torch in here."""
