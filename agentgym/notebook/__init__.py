"""What a notebook shows: tables, curves, conversations, progress."""
