"""The code that runs in a sandbox's server: it uses only the standard library, in a bare `python -I -S`."""
