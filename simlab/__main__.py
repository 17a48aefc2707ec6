"""The process: ``simlab`` and ``python -m simlab`` begin here, and end without a traceback."""

from __future__ import annotations

import signal
import sys


def run() -> int:
    """Run the command line; returns the exit code (see simlab.cli.main), 143 after SIGTERM."""
    terminated = False

    def terminate(signum: int, frame: object) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)
    try:
        from simlab.cli import main

        code = main()
    except KeyboardInterrupt:  # while the imports ran
        print("simlab: interrupted", file=sys.stderr)
        code = 130
    return 143 if terminated and code == 130 else code


if __name__ == "__main__":
    sys.exit(run())
