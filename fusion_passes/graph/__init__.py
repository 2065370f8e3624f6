"""What a post-grad graph is made of: operators, dependencies, edits, text."""
