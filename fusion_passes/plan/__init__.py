"""Decisions: which gradients share a bucket, how large it is, where it is scaled. All pure."""
