"""What every room uses and that is about nothing in particular: files, memory, checks."""
