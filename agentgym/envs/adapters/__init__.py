"""Environments of other libraries under Gymnasium's `make`, by their id alone; a library is imported when needed."""
