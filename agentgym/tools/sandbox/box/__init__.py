"""What runs inside the server of a sandbox: the standard library alone, loaded by a bare interpreter (`python -I -S`)."""
