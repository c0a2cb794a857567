"""Progress of long work, on standard error."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]  # done, of how many, what is being done
