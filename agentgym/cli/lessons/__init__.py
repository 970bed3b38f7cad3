"""The commands that train a model on recorded text, without playing."""
