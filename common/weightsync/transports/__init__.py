"""Moving the bytes of a push from a trainer's arena to the ranks of engines; `base` says what a transport offers."""
