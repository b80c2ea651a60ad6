"""Stoker keeps GPUs busy, and notices when they are not."""

__all__ = ["Job", "Queue", "Sentinel", "SentinelState", "__version__", "get_gpu_usage", "step"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.client import Queue
    from stoker.dropin.usage import get_gpu_usage
    from stoker.queue.model import Job
    from stoker.rules.sentinel import Sentinel, SentinelState
    from stoker.step_file import step
    from stoker.version import __version__
else:

    def __getattr__(name: str) -> object:
        """Imports a public name on first use, so using one does not import all."""
        if name == "step":
            from stoker.step_file import step

            # Later lookups bypass this function: it is called in training loops.
            globals()["step"] = step
            return step
        if name == "get_gpu_usage":
            from stoker.dropin.usage import get_gpu_usage

            return get_gpu_usage
        if name == "Queue":
            from stoker.client import Queue

            return Queue
        if name == "Job":
            from stoker.queue.model import Job

            return Job
        if name in {"Sentinel", "SentinelState"}:
            from stoker.rules import sentinel

            return getattr(sentinel, name)
        if name == "__version__":
            from stoker.version import __version__

            return __version__
        raise AttributeError(f"module 'stoker' has no attribute {name!r}")
