"""Worker extensions of the kind that trainer frameworks bring, with weightsync mixed in and without."""

from vllm_weightsync import WorkerExtension


class ForeignExtension:
    """What such a framework adds to every worker; one method has a name that weightsync uses too."""

    def framework_says(self, word):
        """Show that this method runs in the worker."""
        return f"{word} from rank {self.rank}"

    def update_weights_via_ipc_zmq(self):
        """As NeMo-RL's, which takes nothing."""
        return f"theirs on rank {self.rank}"


class Framework:
    """Another, which shares no name."""

    framework_says = ForeignExtension.framework_says


class UserExtension(Framework, WorkerExtension):
    """Both in the one slot that vLLM has, and a method of ours that the user has changed."""

    def weightsync_status(self, payload="{}"):
        """As ours; counts."""
        self.asked = getattr(self, "asked", 0) + 1
        return super().weightsync_status(payload)

    def times_asked(self):
        """How often this rank was asked for its status."""
        return getattr(self, "asked", 0)
