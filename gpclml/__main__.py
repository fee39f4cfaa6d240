"""``python -m gpclml``, which is the command ``gpclml``."""

import sys

from gpclml._utils.extras import needs_extra


def main() -> None:
    """The command; ends with a sentence where a package is missing that it needs."""
    try:
        with needs_extra("tables"):
            from gpclml.tables.command import main
    except ImportError as error:
        sys.exit(f"Error: {error}")
    main()


if __name__ == "__main__":
    main()
