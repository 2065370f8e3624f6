"""What is changed in torch while the flag is set, and how it is undone."""
