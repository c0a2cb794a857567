"""The one exception that is the user's business: the command line prints its text and exits."""


class LadderError(ValueError):
    """Bad input. The text names what was wrong, the value, and what to do."""
