"""The exceptions that are the user's business: the command line prints their text and exits."""


class LadderError(ValueError):
    """Bad input. The text names what was wrong, the value, and what to do."""


class RankError(RuntimeError):
    """A rank failed while it worked, and all were stopped. The text names it."""
