"""Settings: classes of them, and those of the functions that a run names."""
