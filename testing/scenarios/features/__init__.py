"""What is tried: functions that train, each for one scenario or a few."""
