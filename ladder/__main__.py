"""`python -m ladder`."""

from ladder.cli import main

if __name__ == "__main__":
    main()
