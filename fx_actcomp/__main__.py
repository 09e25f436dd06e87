"""``python -m fx_actcomp demo``."""

from __future__ import annotations

import argparse

from . import demo


def main() -> None:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(prog="python -m fx_actcomp", description="Train in less memory.")
    commands = parser.add_subparsers(required=True)
    shown = commands.add_parser("demo", help=(demo.__doc__ or "").splitlines()[0], description=demo.__doc__)
    demo.add_arguments(shown)
    shown.set_defaults(run=demo.main)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
