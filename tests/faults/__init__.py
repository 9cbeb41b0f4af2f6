"""Faults on demand in real engines and real trainers: ``make faults`` prints the outcome of each."""
