"""Faults on demand in real engines and real trainers: ``make faults`` prints what comes of each."""
