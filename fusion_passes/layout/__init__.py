"""The buckets of a module, and how large they become. Pure."""
