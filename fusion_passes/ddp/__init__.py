"""DDP's Python reducer under the flag: who owns a reduction, the hook that is traced, and what the
Python reducer leaves out, given back."""
