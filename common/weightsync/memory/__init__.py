"""Memory that several processes map, and what a process can find out about other processes and memory limits."""
