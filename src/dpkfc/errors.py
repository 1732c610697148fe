"""The one exception of the package: something would break, or silently weaken, the guarantee."""


class PrivacyError(RuntimeError):
    """Raised before any budget is spent; says what was wrong, where, and what to do."""
