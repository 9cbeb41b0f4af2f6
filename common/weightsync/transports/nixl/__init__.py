"""One-sided reads, and writes, by NIXL."""
