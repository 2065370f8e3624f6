"""Reports what the flag did, for people."""
