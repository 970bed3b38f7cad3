"""The time and speed of a step: clock, work, peak, memory and traces."""
