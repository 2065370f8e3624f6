"""What only a GPU can show, in parts that run in processes of their own."""
