"""Checks a small random model of each known architecture and stores what is found for `agentgym models list`.

    python benchmarks/architectures.py && python docs/pages.py

About ten minutes on two cores. With names, only those are checked again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import transformers

from agentgym.errors import ConfigError
from agentgym.trainers.model_check.checks import check_model
from agentgym.trainers.model_check.known import KnownModel, known_models, write_known
from agentgym.trainers.model_check.small_models import ARCHITECTURES, save_small_model


def check(architecture: str) -> KnownModel:
    """Checks one architecture; one that transformers does not know is stored with its reason."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_small_model(architecture, Path(folder))
        except ConfigError as error:
            return KnownModel(architecture, {"loads": (False, str(error))})
        results = {result.name: (result.passed, result.found) for result in check_model(Path(folder))}
    return KnownModel(architecture, results)


def main() -> None:
    """Checks the architectures and writes the file."""
    named = sys.argv[1:]
    models = {model.architecture: model for model in known_models()[1]}
    for architecture in named or ARCHITECTURES:
        models[architecture] = check(architecture)
        failed = {name: found for name, (passed, found) in models[architecture].results.items() if not passed}
        print(architecture, failed or "ok", flush=True)
        write_known(transformers.__version__, [models[name] for name in ARCHITECTURES if name in models])


if __name__ == "__main__":
    main()
