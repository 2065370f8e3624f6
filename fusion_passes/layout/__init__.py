"""The buckets of a module and their sizes. Pure."""
