"""Learning without playing: from demonstrations, conversations, recorded episodes and pairs of replies."""
