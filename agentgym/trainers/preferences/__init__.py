"""Direct preference optimization: a model learns from pairs of a better and a worse reply to the same prompt."""
