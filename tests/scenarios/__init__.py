"""Random sequences of all that may happen to engines and trainers: ``make scenarios`` looks for what is untrue."""
