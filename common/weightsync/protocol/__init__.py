"""What crosses between processes, and its rules: messages, states, names, the key. Nothing here loads torch."""
