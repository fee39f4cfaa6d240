"""``python -m gpclml``."""

from gpclml.tables.command import main

if __name__ == "__main__":
    main()
