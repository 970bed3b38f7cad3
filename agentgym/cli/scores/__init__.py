"""Commands on the scores of recorded episodes."""
