"""Models in GGUF: the file as it is on the disk, and the folder that is made of it."""
