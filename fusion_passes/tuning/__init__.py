"""The mode ``"auto"``: buckets from what was measured."""
