"""The command `ladder`, and `python -m ladder`."""

import sys


def main() -> None:
    """Ctrl-C is silent from the first moment: importing takes some of them."""
    try:
        from ladder.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
