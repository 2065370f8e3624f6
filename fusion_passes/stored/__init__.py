"""The backward that AOTAutograd compiles with a forward, made to store gradients in buckets."""
