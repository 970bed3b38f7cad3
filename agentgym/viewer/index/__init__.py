"""The index of a run's episodes, which finds, filters, sorts and groups them without reading their file again."""
