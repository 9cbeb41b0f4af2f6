"""Random sequences of events at engines and trainers: ``make scenarios`` looks for violations."""
