"""What runs for backwards that compiled autograd traces alone."""
