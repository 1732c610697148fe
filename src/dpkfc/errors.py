"""The exceptions that protect the privacy guarantee."""


class PrivacyError(RuntimeError):
    """Raised where continuing would break, or silently weaken, the privacy guarantee.

    Examples: two processes charge one run of a ledger, noise would be used twice, public data
    contain private records. The message says what was wrong, where, and what to do.

    A bad argument raises `ValueError` or `TypeError` instead.
    """


class CaptureError(PrivacyError):
    """The gradients of some modules cannot be captured per sample, module by module.

    A module around them may still run as a whole under vmap.

    Args:
        message: what was wrong, where, and what to do.
        modules: names of the modules.
    """

    def __init__(self, message: str, *modules: str) -> None:
        super().__init__(message)
        self.modules = modules
