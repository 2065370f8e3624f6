"""What is changed in torch, from when to when, and how it is undone."""
