"""Checks a small random model of each known architecture and stores what is found for `agentgym models list`.

    python benchmarks/architectures.py && python docs/pages.py
    python benchmarks/architectures.py --engine sglang --python PYTHON NAME...

About ten minutes on two cores. With names, only those are checked again. With an engine, only what a server of it finds
is stored, a minute an architecture; other results stay.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import transformers

from agentgym.engines.server_kind import SERVERS
from agentgym.errors import ConfigError
from agentgym.trainers.model_check.checks import check_model
from agentgym.trainers.model_check.known import KnownModel, known_models, write_known
from agentgym.trainers.model_check.server_checks import check_on_server
from agentgym.trainers.model_check.small_models import ARCHITECTURES, save_small_model


def check(architecture: str, model: KnownModel | None) -> KnownModel:
    """Checks one architecture; what servers found stays. One that transformers does not know has a reason instead."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_small_model(architecture, Path(folder))
        except ConfigError as error:
            return KnownModel(architecture, {"loads": (False, str(error))})
        results = {result.name: (result.ok, result.found) for result in check_model(Path(folder))}
    served = {name: model.results[name] for name in SERVERS if model and name in model.results}
    return KnownModel(architecture, results | served)


def check_served(model: KnownModel, kind: str, python: str) -> KnownModel:
    """Checks one architecture on a server."""
    with tempfile.TemporaryDirectory() as folder:
        save_small_model(model.architecture, Path(folder))
        result = check_on_server(Path(folder), kind, python)
    return KnownModel(model.architecture, {**model.results, kind: (result.ok, result.found)})


def main() -> None:
    """Checks the architectures and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--engine", choices=SERVERS)
    parser.add_argument("--python", default="")
    options = parser.parse_args()
    models = {model.architecture: model for model in known_models()[1]}
    for architecture in options.names or ARCHITECTURES:
        if options.engine:
            models[architecture] = check_served(models[architecture], options.engine, options.python)
        else:
            models[architecture] = check(architecture, models.get(architecture))
        failed = {name: result for name, (passed, result) in models[architecture].results.items() if not passed}
        print(architecture, failed or "ok", flush=True)
        write_known(transformers.__version__, [models[name] for name in ARCHITECTURES if name in models])


if __name__ == "__main__":
    main()
