"""What a managed module has in place of DDP's forward, buffers, ``join`` and copies; which modules
DDP's own reducer trains; which backwards are traced."""
