"""Memory that several processes map, and what can be seen of those processes."""
