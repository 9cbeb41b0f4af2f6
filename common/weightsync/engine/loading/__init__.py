"""Loading in a rank: by the engine's own loader, or by a plan recorded from it."""
