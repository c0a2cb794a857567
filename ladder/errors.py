"""The one exception that is the user's business: its text is the whole message, the command line prints it and exits."""


class LadderError(ValueError):
    """Bad input. The text names what was wrong, the value, and what to do."""
