"""Code that runs only for backwards that compiled autograd traces."""
