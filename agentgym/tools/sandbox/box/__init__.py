"""What runs in the server of a sandbox: the standard library alone, in a bare interpreter (`python -I -S`)."""
