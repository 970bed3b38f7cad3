"""What commands draw with rich: tables, bars, and the display of a running training."""
