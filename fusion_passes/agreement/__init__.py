"""What the ranks agree on before anything is launched."""
