"""All trainings that are compared with eager DDP: ``catalog`` lists them, ``features`` has their
code.

``tests/reducer/test_scenarios.py`` trains all of them, ``make gpu`` those that depend on the
device.
"""
