"""The output of commands that rich draws: tables, bars, and the display of a running training."""
