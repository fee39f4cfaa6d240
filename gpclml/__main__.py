"""``python -m gpclml``."""

from gpclml.command_line import main

if __name__ == "__main__":
    main()
