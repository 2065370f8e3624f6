"""All that is trained beside eager DDP: ``catalog`` says what, ``features`` have the trainings.

Tests, the nightly matrix and ``make gpu`` run over the same entries.
"""
