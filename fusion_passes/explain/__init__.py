"""See what was done in the steps of a training: recording, the whole report, and the command."""
