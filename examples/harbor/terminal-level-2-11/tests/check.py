"""Prints 1 if the working folder holds the expected files and no other, else 0."""

import json
import os
from pathlib import Path

root = Path(os.environ.get("AGENTGYM_ROOT") or "/")
expected = json.loads((root / "tests" / "expected.json").read_text())
files = {}
for path in sorted((root / "app").rglob("*")):
    if path.is_symlink() or not path.is_dir():
        is_plain = path.is_file() and not path.is_symlink()
        content = path.read_bytes().rstrip().decode("latin-1") if is_plain else None
        files[path.relative_to(root / "app").as_posix()] = content
print(int(files == expected))
