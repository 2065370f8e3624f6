"""The features under test: functions that train, each for one or a few scenarios."""
