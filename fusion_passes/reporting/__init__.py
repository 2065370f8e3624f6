"""What the flag did, for people."""
