"""The exception that protects the privacy guarantee."""


class PrivacyError(RuntimeError):
    """Raised where continuing would break, or silently weaken, the privacy guarantee.

    Examples: two processes charge one run of a ledger, noise would be used twice, public data
    contain private records. The message says what was wrong, where, and what to do.

    A bad argument raises `ValueError` or `TypeError` instead.
    """
