"""The mode ``"auto"``: measures the first steps with several layouts, and keeps the fastest."""
