"""Where a step's seconds go, and how fast it was: clock, work, peak, memory and traces."""
