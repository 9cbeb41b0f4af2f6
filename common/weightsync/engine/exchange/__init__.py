"""What a standby is made with: work in slices between an engine's steps, and the exchange of two models' weights."""
