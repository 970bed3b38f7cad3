"""Registers agentgym's environments right after Gymnasium has been imported, in a program that imports nothing else.

Gymnasium 1.x loads no plugins, so `install` is called whenever Python starts: by `_agentgym_gymnasium.pth`, and from
Python 3.15 on by `_agentgym_gymnasium.start` (PEP 829). It only puts a finder in front that waits for `gymnasium`:
under a millisecond of a start, and agentgym is not imported.
"""

import sys

TYPE_CHECKING = False  # `typing` would cost more than all the rest
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class GymnasiumWatch:
    """A meta-path finder that finds what the others find; it goes away when Gymnasium has been imported."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """The spec of `gymnasium`, whose loader registers the environments when it is done; None for other names."""
        if name != "gymnasium":
            return None
        others = (finder.find_spec(name, None, None) for finder in sys.meta_path if finder is not cls)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader, load = spec.loader, spec.loader.exec_module

        def load_and_register(module: "ModuleType") -> None:
            del loader.exec_module  # restores the loader's own method
            load(module)
            if cls in sys.meta_path:
                sys.meta_path.remove(cls)
                register()

        loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Registers the environments. A failure of agentgym is a warning: Gymnasium works without it."""
    try:
        from agentgym.envs.catalog.plugin import register_envs

        register_envs()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # `import gymnasium` belongs to other people's programs
        message = f"agentgym's environments are not registered with Gymnasium: {error!r}"
        import warnings

        try:
            warnings.warn(message, stacklevel=2)
        except Warning:  # where warnings are errors
            print(f"warning: {message}", file=sys.stderr)


def install() -> None:
    """Puts the finder in front, once."""
    if GymnasiumWatch not in sys.meta_path:
        sys.meta_path.insert(0, GymnasiumWatch)
