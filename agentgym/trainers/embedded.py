"""Makes the embedded model: the command `python -m agentgym.trainers.embedded --output FOLDER`."""

from agentgym.trainers.sft.make_embedded import RecipeConfig, main, make_embedded

__all__ = ["RecipeConfig", "make_embedded"]

if __name__ == "__main__":
    main()
