"""A trainer of several processes: what its ranks say to each other, and who writes what."""
