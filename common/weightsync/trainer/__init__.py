"""The trainer side: `Sender` and its parts."""
