"""What a machine with a GPU is asked, in one command: tests, speed, studies, and a large study."""
