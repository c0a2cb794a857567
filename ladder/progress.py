"""How long work tells how far it is."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]  # done, of how many, what is being done
