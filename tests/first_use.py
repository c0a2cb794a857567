"""What a user does first after installing the package, with nothing but what that brings.

python tests/first_use.py LADDER

LADDER is the installed command. `make dist` runs this for a wheel and for a source distribution, each in an environment
of its own.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

COMMANDS = (
    ("--version",),
    ("generate", "--prompt", "It was a dark and stormy night", "--max-new-tokens", "8"),
    ("generate", "--tp", "2", "--prompt", "It was a dark and stormy night", "--max-new-tokens", "8", "--json"),
    ("plan", "--json"),
    ("doctor",),
    ("doctor", "--json"),
)


def main(ladder: Path) -> None:
    for arguments in COMMANDS:
        with tempfile.TemporaryDirectory() as elsewhere:  # not in the checkout, whose package would be found first
            done = subprocess.run([ladder, *arguments], cwd=elsewhere, capture_output=True, text=True, timeout=300)
        sys.stdout.write(f"ladder {' '.join(arguments)}\n")
        if done.returncode or "Traceback" in done.stderr or len(done.stdout.strip()) < 5:
            sys.exit(f"failed with status {done.returncode}: {done.stderr or done.stdout}")
        if "--json" in arguments:
            json.loads(done.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
