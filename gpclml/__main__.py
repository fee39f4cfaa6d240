"""``python -m gpclml``."""

from gpclml.cli import main

if __name__ == "__main__":
    main()
