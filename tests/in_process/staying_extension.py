"""A worker extension with which vLLM on a CPU is as on a GPU: layers stay as loaded, weights where they are."""

from benchmarks import staying  # noqa: F401 - packing is off, and addresses stay
from weightsync.engine.exchange.copied import Copied

_exchange = Copied.exchange


class StayingExtension:
    """What a test asks the workers."""

    def where_weights_are(self):
        return {name: tensor.data_ptr() for name, tensor in self.get_model().named_parameters()}

    def fail_in_the_next_copy(self, rank):
        """Have the rank's next copy of a standby fail when a part of it was made."""
        if self.rank != rank:
            return

        def fails(pairs):
            Copied.exchange = _exchange
            pairs.torn = True
            next(pairs._on_host.steps(1))
            raise OSError("no luck")

        Copied.exchange = fails
