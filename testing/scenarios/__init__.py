"""All that is trained beside eager DDP: ``catalog`` says what, ``features`` have the trainings.

``tests/reducer/test_scenarios.py`` trains all of it, ``make gpu`` what depends on the device.
"""
