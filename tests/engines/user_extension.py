"""A user's own worker extension, of the kind that trainer frameworks bring, with weightsync mixed in."""

from vllm_weightsync import WorkerExtension


class Framework:
    """What such a framework adds to every worker."""

    def framework_says(self, word):
        """Show that this method runs in the worker."""
        return f"{word} from rank {self.rank}"


class UserExtension(Framework, WorkerExtension):
    """Both in the one slot that vLLM has."""
