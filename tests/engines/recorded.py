"""What an engine's Python computes while something is done in it."""

from torch.overrides import TorchFunctionMode


class _OneElement(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if args and getattr(args[0], "numel", int)() == 1:
            self.names.add(function.__name__)
        return function(*args, **(kwargs or {}))


def one_element_calls(act):
    """Names of the functions of torch that ``act`` calls with a tensor of one element."""
    with _OneElement() as seen:
        act()
    return sorted(seen.names)
