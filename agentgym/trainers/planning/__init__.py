"""What a training run would need and how fast it would be, from its shapes and the speeds of devices."""
